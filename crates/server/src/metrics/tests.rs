//! The metrics page, and the guide's page about it.

use std::path::PathBuf;

use super::family::{Family, ROWS};
use super::*;
use prometheus_client::metrics::MetricType;

#[test]
fn every_source_is_one_series() {
    let counted = BTreeMap::from([(None, 1), (Some("none".to_owned()), 2), (Some("stripe".to_owned()), 4)]);
    let expected = [("none", 3), ("stripe", 4)].map(|(source, count)| (source.to_owned(), count));
    assert_eq!(by_source(counted), expected.into());
    assert_eq!(by_source(BTreeMap::new()), [("none".to_owned(), 0)].into());
}

#[derive(Debug)]
struct Sample;

impl Collector for Sample {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counter =
            Family { name: "a", kind: MetricType::Counter, labels: ["topic", "code"], help: "What is counted." };
        let gauge = Family { name: "b", kind: MetricType::Gauge, labels: [], help: "How much." };
        let mut page = Page(encoder);
        let topics = ["a\"b\\c\nd", "x\u{202e}y\u{1b}"].map(|topic| ([topic.into(), "x".into()], 3_u64));
        page.family(&counter, topics)?;
        page.family(&counter, [([String::new(), "only".into()], 1_u64)])?;
        page.family(&gauge, [([], 0.25)])
    }
}

#[test]
fn labels_are_escaped_and_neutralised_and_left_out_where_they_are_empty() {
    let (mut registry, mut page) = (Registry::default(), String::new());
    registry.register_collector(Box::new(Sample));
    text::encode(&mut page, &registry).expect("written");
    let expected = "# HELP a What is counted.\n# TYPE a counter\na_total{topic=\"a\\\"b\\\\c\\nd\",code=\"x\"} 3\n\
         a_total{topic=\"x\\\\u{202e}y\\\\u{1b}\",code=\"x\"} 3\n# HELP a What is counted.\n# TYPE a counter\n\
         a_total{code=\"only\"} 1\n# HELP b How much.\n# TYPE b gauge\nb 0.25\n# EOF\n";
    assert_eq!(page, expected);
}

/// The name that a query uses: that of a counter ends with `_total`.
fn queried(name: &str, kind: MetricType) -> String {
    if matches!(kind, MetricType::Counter) { format!("{name}_total") } else { name.to_owned() }
}

fn documentation(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(path)
}

/// The guide's table equals the declared families. `UPDATE=1` rewrites it.
#[test]
fn the_tables_of_the_guide_are_those_of_the_declared_families() {
    const BEGIN: &str = "<!-- families -->\n";
    const END: &str = "<!-- end of families -->";
    let path = documentation("guide/metrics.md");
    let guide = std::fs::read_to_string(&path).expect("the guide");
    let (before, rest) = guide.split_once(BEGIN).expect("the table's place");
    let (_, after) = rest.split_once(END).expect("the table's end");
    let mut table = "\n| series | type | labels | |\n|---|---|---|---|\n".to_owned();
    for (name, kind, labels, help) in ROWS {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind) = (queried(name, *kind), kind.as_str());
        table += &format!("| `{name}` | {kind} | {} | {help} |\n", labels.join(", "));
    }
    let fresh = format!("{before}{BEGIN}{table}\n{END}{after}");
    if std::env::var_os("UPDATE").is_some() {
        return std::fs::write(&path, fresh).expect("the guide can be written");
    }
    assert!(
        guide == fresh,
        "docs/guide/metrics.md: not as declared; run UPDATE=1 cargo nextest run --workspace --all-features --lib -E \
         'package(postbox-server) and test(tables_of_the_guide)'"
    );
}

/// Every series and label that an alert or a panel uses exists.
#[test]
fn alerts_and_the_dashboard_ask_for_what_there_is() {
    for file in ["monitoring/alerts.yml", "monitoring/dashboard.json"] {
        let text = std::fs::read_to_string(documentation(file)).expect(file);
        let mut asked = 0;
        for at in text.match_indices("postbox_").map(|(at, _)| at) {
            let word = |text: &str| {
                text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default().to_owned()
            };
            let series = word(&text[at..]);
            let family = ROWS.iter().find(|(name, kind, ..)| {
                let is_part = |part| matches!(kind, MetricType::Histogram) && series == format!("{name}{part}");
                series == queried(name, *kind) || ["_bucket", "_sum", "_count"].into_iter().any(is_part)
            });
            let (.., labels, _) = family.unwrap_or_else(|| panic!("{file}: no series {series}"));
            asked += 1;
            let Some(selector) = text[at + series.len()..].strip_prefix('{') else { continue };
            let selector = selector.split('}').next().unwrap_or_default();
            for label in selector.split(',').map(word) {
                assert!(labels.contains(&label.as_str()), "{file}: {series} has no label {label}");
            }
        }
        assert!(asked > 0, "{file} asks for nothing");
    }
}
