//! Sign and verify webhooks exactly as their providers specify. No I/O.
