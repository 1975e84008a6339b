//! Reading a body: bounded while it streams, whatever its length claims to be, and in bounded time.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use postbox_core::Clock;

use crate::SourceLimits;
use crate::answer::Answer;
use crate::buffer::Share;

/// Refuses what needs no reading: transfer codings that we do not undo, encodings (a signature
/// covers the bytes as sent, and a small body may unpack to a huge one) and bodies that admit that
/// they are too large.
pub(crate) fn check_headers(headers: &HeaderMap, limits: &SourceLimits) -> Result<(), Answer> {
    // A length beside it is not seen here: the server drops that header and closes the connection
    // after the answer (RFC 9112, 6.3).
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let chunked = |value: &http::HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if !codings.next().is_none_or(chunked) || codings.next().is_some() {
        return Err(Answer::TransferRefused);
    }
    let identity = |value: &http::HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    if !headers.get_all(header::CONTENT_ENCODING).iter().all(identity) {
        return Err(Answer::EncodingRefused);
    }
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match declared {
        Some(length) if length > limits.body_bytes as u64 => Err(Answer::BodyTooLarge),
        _ => Ok(()),
    }
}

/// Reads the whole body, in the time given.
pub(crate) async fn read(
    body: Body,
    bytes_max: usize,
    share: &mut Share<'_>,
    clock: &dyn Clock,
    timeout: Duration,
) -> Result<Bytes, Answer> {
    // In this order: a body that is there needs no timer.
    tokio::select! {
        biased;
        received = collect(body, bytes_max, share) => received,
        () = clock.sleep(timeout) => Err(Answer::BodyTooSlow),
    }
}

async fn collect(mut body: Body, bytes_max: usize, share: &mut Share<'_>) -> Result<Bytes, Answer> {
    let claimed = body.size_hint().exact().and_then(|length| usize::try_from(length).ok());
    let most = claimed.unwrap_or(bytes_max).min(bytes_max);
    // Nothing is reserved ahead: a claimed length costs its sender nothing.
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame.map_err(|_| Answer::BodyBroken)?.into_data() else { continue };
        if length + chunk.len() > bytes_max {
            return Err(Answer::BodyTooLarge);
        }
        // Copied, because a chunk keeps the whole buffer alive that it was cut from.
        share.append(&chunk, length, most)?;
        length += chunk.len();
    }
    share.take()
}
