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
const BODY_BYTES_MAX = 16 * 1024 * 1024;
// What stands before the 32 bytes of an Ed25519 key in the form that Node reads.
const ED25519_PREFIX = Buffer.from("302a300506032b6570032100", "hex");

/** Returns the message's id if one of `secrets` signed exactly these bytes, else null: answer 401 and say no more. */
// `headers` is `request.headersDistinct` of node:http: `request.headers` glues a header that is there twice into one, and what is there twice says two
// things. `body` is the bytes as they came: parse them afterwards, never before.
export function verify(secrets, headers, body, now = Date.now() / 1000) {
  const only = (name) => (Array.isArray(headers[name]) && headers[name].length === 1 ? headers[name][0] : "");
  const id = only("webhook-id");
  const timestamp = only("webhook-timestamp");
  if (!/^[0-9]{1,12}$/.test(timestamp) || id === "" || id.includes(".")) return null;
  const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
  // "v1,<base64> v1a,<base64>": one for each of the sender's keys.
  const entries = only("webhook-signature").split(" ");
  const given = (version) =>
    entries.flatMap((entry) => {
      const code = entry.startsWith(`${version},`) ? entry.slice(version.length + 1) : "";
      const bytes = Buffer.from(code, "base64");
      // Node decodes more than base64 (url-safe letters, no padding, tabs in between): only the one right spelling counts.
      return code !== "" && bytes.toString("base64") === code ? [bytes] : [];
    });
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
    let bytes = 0;
    const tooLarge = () => response.writeHead(413, { connection: "close" }).end(() => request.destroy());
    if (Number(request.headers["content-length"]) > BODY_BYTES_MAX) return tooLarge();
    request.on("data", (chunk) => {
      bytes += chunk.length;
      // What comes after the end of the memory for it is not kept.
      bytes > BODY_BYTES_MAX ? response.headersSent || tooLarge() : chunks.push(chunk);
    });
    request.on("end", () => {
      if (response.headersSent) return;
      const body = Buffer.concat(chunks);
      const id = verify(secrets, request.headersDistinct, body);
      // Here: in one transaction, insert the id into a unique column and do the work. If it was there, answer 409.
      if (id !== null) console.log("genuine", id, request.headers["ce-type"], body.length, "bytes");
      response.writeHead(id === null ? 401 : 204).end();
    });
  });
  server.listen(Number(process.argv[2]), "127.0.0.1", () => console.log(`listening on ${server.address().port}`));
}
