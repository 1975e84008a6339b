//! Writes a page of metrics.

use std::fmt;

use postbox_engine::HistogramSnapshot;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::family::Family;
use crate::text::neutralise;

/// Writes one family after the other.
pub(super) struct Page<'a>(pub(super) DescriptorEncoder<'a>);

/// The value of a series.
pub(super) trait Sample {
    fn encode(&self, kind: MetricType, encoder: &mut MetricEncoder<'_>) -> fmt::Result;
}

impl Sample for u64 {
    fn encode(&self, kind: MetricType, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        match kind {
            MetricType::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(self, None),
            _ => encoder.encode_gauge(self),
        }
    }
}

impl Sample for f64 {
    fn encode(&self, _: MetricType, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(self)
    }
}

impl Sample for HistogramSnapshot {
    fn encode(&self, _: MetricType, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_histogram::<NoLabelSet>(self.sum, self.count, &self.buckets, None)
    }
}

impl Page<'_> {
    /// Writes one family and its series: the label values and the sample of each.
    pub(super) fn family<const N: usize, V: Sample>(
        &mut self,
        family: &Family<N>,
        series: impl IntoIterator<Item = ([String; N], V)>,
    ) -> fmt::Result {
        let Family { name, kind, labels, help } = family;
        let mut encoder = self.0.encode_descriptor(name, help, None, *kind)?;
        for (values, value) in series {
            // Publishers choose topics; a topic must not be able to hide a line in a terminal.
            let values = values.map(|value| neutralise(&value, |c| c == '\n'));
            let labels: Vec<(&str, String)> =
                labels.iter().copied().zip(values).filter(|(_, value)| !value.is_empty()).collect();
            if labels.is_empty() {
                value.encode(*kind, &mut encoder)?;
            } else {
                value.encode(*kind, &mut encoder.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
