// Receives webhooks that Postbox (or any sender of Standard Webhooks) signed. Nothing but Node's own modules.
//
//     WEBHOOK_SECRETS="whsec_… whpk_…" node verify.mjs 3000
//
// Copy `verify` into your program; the rest is a small server to try it with. Several secrets while one rotates: `whsec_`
// is shared with the sender (HMAC-SHA256, `v1`), `whpk_` is the sender's public key (Ed25519, `v1a`).
import { createHmac, createPublicKey, timingSafeEqual, verify as verifySignature } from "node:crypto";
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";

const TOLERANCE_S = 300;
// What stands before the 32 bytes of an Ed25519 key in the form that Node reads.
const ED25519_PREFIX = Buffer.from("302a300506032b6570032100", "hex");

/** Returns the message's id if one of `secrets` signed exactly these bytes, else null: answer 401 and say no more. */
// `headers` as node:http has them, `body` the bytes as they came: parse them afterwards, never before.
export function verify(secrets, headers, body, now = Date.now() / 1000) {
  const id = headers["webhook-id"] ?? "";
  const timestamp = headers["webhook-timestamp"] ?? "";
  if (!/^[0-9]{1,12}$/.test(timestamp) || id === "" || id.includes(".")) return null;
  const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
  // "v1,<base64> v1a,<base64>": one for each of the sender's keys.
  const entries = (headers["webhook-signature"] ?? "").split(" ").map((entry) => entry.split(","));
  const given = (version) => entries.filter(([its]) => its === version).map(([, code]) => Buffer.from(code ?? "", "base64"));
  const fits = secrets.some((secret) => {
    if (secret.startsWith("whpk_")) {
      const raw = Buffer.from(secret.slice(5), "base64");
      const key = createPublicKey({ key: Buffer.concat([ED25519_PREFIX, raw]), format: "der", type: "spki" });
      return given("v1a").some((theirs) => verifySignature(null, signed, key, theirs));
    }
    const ours = createHmac("sha256", Buffer.from(secret.replace(/^whsec_/, ""), "base64")).update(signed).digest();
    return given("v1").some((theirs) => theirs.length === ours.length && timingSafeEqual(ours, theirs));
  });
  return fits && Math.abs(now - Number(timestamp)) <= TOLERANCE_S ? id : null;
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  const secrets = process.env.WEBHOOK_SECRETS.split(" ");
  const server = createServer((request, response) => {
    const chunks = [];
    request.on("data", (chunk) => chunks.push(chunk));
    request.on("end", () => {
      const body = Buffer.concat(chunks);
      const id = verify(secrets, request.headers, body);
      // Here: in one transaction, insert the id into a unique column and do the work. If it was there, answer 409.
      if (id !== null) console.log("genuine", id, request.headers["ce-type"], body.length, "bytes");
      response.writeHead(id === null ? 401 : 204).end();
    });
  });
  server.listen(Number(process.argv[2]), "127.0.0.1", () => console.log(`listening on ${server.address().port}`));
}
