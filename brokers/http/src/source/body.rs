//! Reading a body: bounded while it streams, whatever its length claims to be, and in bounded time.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use postbox_core::Clock;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::SourceLimits;
use super::answer::Answer;

/// A body, and its share of what may be buffered.
pub(super) struct Received<'a> {
    pub(super) bytes: Bytes,
    _share: Option<SemaphorePermit<'a>>,
}

/// Refuses what needs no reading: transfer codings that we do not undo, encodings (a signature covers the bytes as sent, and a small body may unpack to a huge one) and
/// bodies that admit that they are too large.
pub(super) fn check_headers(headers: &HeaderMap, limits: &SourceLimits) -> Result<(), Answer> {
    // A length beside it is not seen here: the server drops that header and closes the connection after the answer (RFC 9112, 6.3).
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

/// Reads the whole body.
pub(super) async fn read<'a>(
    body: Body,
    limits: &SourceLimits,
    buffered: &'a Semaphore,
    clock: &dyn Clock,
) -> Result<Received<'a>, Answer> {
    // In this order: a body that is there needs no timer.
    tokio::select! {
        biased;
        received = collect(body, limits.body_bytes, buffered) => received,
        () = clock.sleep(limits.body_timeout) => Err(Answer::BodyTooSlow),
    }
}

async fn collect(mut body: Body, bytes_max: usize, buffered: &Semaphore) -> Result<Received<'_>, Answer> {
    // Nothing is reserved ahead: a claimed length costs its sender nothing.
    let mut bytes = BytesMut::new();
    let mut share: Option<SemaphorePermit<'_>> = None;
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame.map_err(|_| Answer::BodyBroken)?.into_data() else { continue };
        if bytes.len() + chunk.len() > bytes_max {
            return Err(Answer::BodyTooLarge);
        }
        let wanted = u32::try_from(chunk.len()).map_err(|_| Answer::BodyTooLarge)?;
        let permit = buffered.try_acquire_many(wanted).map_err(|_| Answer::Busy)?;
        match &mut share {
            Some(share) => share.merge(permit),
            None => share = Some(permit),
        }
        // Copied, because a chunk keeps the whole buffer alive that it was cut from.
        bytes.extend_from_slice(&chunk);
    }
    Ok(Received { bytes: bytes.freeze(), _share: share })
}
