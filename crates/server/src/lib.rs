//! Config, wiring, HTTP API and metrics: what turns the Postbox library into a service.
