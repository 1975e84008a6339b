//! Postbox over HTTP: a signing webhook sink and a verifying webhook source.
