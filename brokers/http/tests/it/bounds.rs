//! Payload sizes from zero to the largest, compared byte for byte.

use postbox_core::NewEvent;
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX};

use crate::stand::{Target, config, delivery, send, short, sink};

/// Returns bytes of every value, in no simple order.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(length)
    .collect()
}

#[tokio::test]
async fn payloads_of_every_size_arrive_as_they_are() {
    let (target, url) = Target::ok().await;
    let sink = sink(config(url));
    for size in [0, 1, 1024 * 1024 - 1, 1024 * 1024, 1024 * 1024 + 1, PAYLOAD_BYTES_MAX] {
        let payload = noise(size);
        let event = NewEvent::new("t", payload.clone(), "application/octet-stream");
        assert_eq!(short(&send(&sink, &delivery(1, event)).await), ("delivered", ""), "{size}");
        let seen = target.seen().pop().expect("a request");
        assert!(seen.body == payload, "{size} bytes changed on the way");
    }
}

#[tokio::test]
async fn the_largest_event_that_can_be_appended_can_be_sent() {
    let (target, url) = Target::ok().await;
    let value = "v".repeat(HEADER_BYTES_MAX / HEADERS_MAX - 10);
    let event = NewEvent::json("t".repeat(TOPIC_BYTES_MAX), "{}").key("é".repeat(KEY_BYTES_MAX / 2));
    let event = (0..HEADERS_MAX).fold(event, |event, number| event.header(format!("h{number:02}"), value.clone()));
    event.validate().expect("it can be appended");
    assert_eq!(short(&send(&sink(config(url)), &delivery(1, event)).await), ("delivered", ""));
    assert_eq!(target.seen()[0].headers["h63"], value);
}
