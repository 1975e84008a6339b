//! Header names that belong to one request, not to the message in it.

use std::borrow::Cow;

use postbox_core::envelope::Binding;

/// Framing and routing of HTTP, what the body determines, and credentials that HTTP itself defines.
const OF_HTTP: [&str; 20] = [
    "accept-encoding",
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "date",
    "expect",
    "forwarded",
    "host",
    "http2-settings",
    "keep-alive",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
];

/// Prefixes of names that Postbox or HTTP itself sets: signatures, and what is meant for a proxy.
const PREFIXES_OF_OURS: [&str; 3] = ["proxy-", "svix-", "webhook-"];

/// More credentials, signatures by others, and what proxies set. Handlers believe that a proxy set
/// these: who calls, and which method and path are meant.
const OF_ONE_HOP: [&str; 55] = [
    "api-key",
    "apikey",
    "cf-connecting-ip",
    "cf-connecting-ipv6",
    "client-ip",
    "dapr-api-token",
    "deploy-token",
    "dpop",
    "front-end-https",
    "max-forwards",
    "origin",
    "pragma",
    "private-token",
    "range",
    "remote-email",
    "remote-groups",
    "remote-name",
    "signature",
    "signature-input",
    "stripe-signature",
    "www-authenticate",
    "x-access-token",
    "x-amz-security-token",
    "x-api-key",
    "x-arr-clientcert",
    "x-auth-key",
    "x-auth-token",
    "x-authorization",
    "x-azure-clientip",
    "x-azure-socketip",
    "x-client-cert",
    "x-csrf-token",
    "x-endpoint-api-userinfo",
    "x-gitlab-token",
    "x-http-method",
    "x-http-method-override",
    "x-id-token",
    "x-jwt-assertion",
    "x-method-override",
    "x-originating-ip",
    "x-real-ip",
    "x-refresh-token",
    "x-rewrite-url",
    "x-scheme",
    "x-secret",
    "x-serverless-authorization",
    "x-session-token",
    "x-shopify-hmac-sha256",
    "x-slack-request-timestamp",
    "x-slack-signature",
    "x-twilio-signature",
    "x-url-scheme",
    "x-userinfo",
    "x-vault-token",
    "x-xsrf-token",
];

/// Prefixes of more such names.
const PREFIXES_OF_ONE_HOP: [&str; 28] = [
    "cf-access-",
    "if-",
    "proxy-",
    "remote-user",
    "sec-",
    "ssl-client-",
    "tailscale-user-",
    "x-amzn-mtls-",
    "x-amzn-oidc-",
    "x-appengine-",
    "x-auth-request-",
    "x-authenticated-",
    "x-authentik-",
    "x-consumer-",
    "x-credential-",
    "x-envoy-",
    "x-forwarded",
    "x-goog-authenticated-user-",
    "x-goog-iap-",
    "x-hub-signature",
    "x-ms-client-principal",
    "x-ms-token-",
    "x-original-",
    "x-pomerium-",
    "x-remote-",
    "x-ssl-client-",
    "x-vouch-",
    "x-webauth-",
];

/// The end of a name that says who calls: `true-client-ip`, `x-cluster-client-ip` …
const SUFFIX_OF_ONE_HOP: &str = "-client-ip";

/// Whether Postbox or HTTP itself sets the header of this name, in lower case. Neither events nor
/// the configuration set it, except that the configuration may set `authorization`.
pub(crate) fn is_ours(name: &str) -> bool {
    OF_HTTP.contains(&name)
        || PREFIXES_OF_OURS.iter().any(|prefix| name.starts_with(prefix))
        || Binding::HTTP.is_reserved(name)
}

/// Whether the header of this name, in lower case, belongs to one request: HTTP itself, a
/// credential, a signature or a proxy uses the name. No incoming event keeps such a header, and no
/// outgoing event sets one. The configuration of a sink may set `authorization`, and those that
/// neither Postbox nor HTTP itself sets, because the operator is trusted.
pub fn is_of_one_request(name: &str) -> bool {
    let name = &*hyphenated(name);
    OF_HTTP.contains(&name)
        || OF_ONE_HOP.contains(&name)
        || PREFIXES_OF_ONE_HOP.iter().any(|prefix| name.starts_with(prefix))
        || name.ends_with(SUFFIX_OF_ONE_HOP)
}

/// Returns the name with `-` for `_`. CGI, WSGI and PHP have one variable for both spellings, so
/// that an event's `webhook_id` would replace our `webhook-id`.
pub(crate) fn hyphenated(name: &str) -> Cow<'_, str> {
    if name.contains('_') { name.replace('_', "-").into() } else { name.into() }
}
