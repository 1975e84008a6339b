//! Reads bodies, bounded in size while they stream (whatever length they claim) and in time.

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

/// Refuses a request by its headers alone: unsupported transfer codings, content encodings (a
/// signature covers the bytes as sent, and a small body may unpack to a huge one), and bodies whose
/// declared length is too large.
pub(crate) fn check_headers(headers: &HeaderMap, limits: &SourceLimits) -> Result<(), Answer> {
    // A `content-length` besides it never arrives here: the server drops that header and closes the
    // connection after the answer (RFC 9112, 6.3).
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

/// Reads the whole body within `timeout`.
pub(crate) async fn read(
    body: Body,
    bytes_max: usize,
    share: &mut Share<'_>,
    clock: &dyn Clock,
    timeout: Duration,
) -> Result<Bytes, Answer> {
    // Biased: a body that is already here is read without starting a timer.
    tokio::select! {
        biased;
        received = collect(body, bytes_max, share) => received,
        () = clock.sleep(timeout) => Err(Answer::BodyTooSlow),
    }
}

async fn collect(mut body: Body, bytes_max: usize, share: &mut Share<'_>) -> Result<Bytes, Answer> {
    let claimed = body.size_hint().exact().and_then(|length| usize::try_from(length).ok());
    let most = claimed.unwrap_or(bytes_max).min(bytes_max);
    // Memory is reserved for bytes that arrived, never for a declared length.
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame.map_err(|_| Answer::BodyBroken)?.into_data() else { continue };
        if length + chunk.len() > bytes_max {
            return Err(Answer::BodyTooLarge);
        }
        // Copied, because a chunk keeps alive the whole read buffer that it is part of.
        share.append(&chunk, length, most)?;
        length += chunk.len();
    }
    share.take()
}
