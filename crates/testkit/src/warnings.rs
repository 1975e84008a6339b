//! Collects log warnings for a test.

use std::sync::{Arc, Mutex};

/// The warnings of this thread, each as `field=value …` in the order of its fields.
#[derive(Debug, Clone, Default)]
pub struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Collects until the guard is dropped.
    pub fn hear() -> (Self, tracing::subscriber::DefaultGuard) {
        let warnings = Self::default();
        (warnings.clone(), tracing::subscriber::set_default(warnings))
    }

    /// Returns all of them, in order.
    pub fn all(&self) -> Vec<String> {
        self.0.lock().expect("no panic while held").clone()
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        // The spans too, for who turns traces on.
        *metadata.level() <= tracing::Level::WARN || metadata.target() == postbox_core::trace::TARGET
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Line(String);
        impl tracing::field::Visit for Line {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().expect("no panic while held").push(line.0);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
