//! One table with every kind of key, read from trees with faults.

use std::time::Duration;

use super::*;

table! {
    /// Things that wait.
    struct QueueTable {
        /// Most things that wait.
        ///
        /// More are refused.
        capacity: usize = Integer(1_usize..=1_000), default(100);
        /// Longest wait.
        wait: Option<Duration> = Span(Duration::from_secs(1)), unset("for ever", r#""30s""#);
        /// Where to.
        target: String = Plain, required(r#""here""#);
        /// In which order.
        order: u8 = Words(&[("first", 1), ("last", 2)]), default("first");
        /// Bounds.
        bounds: BoundsTable = Nested::<BoundsTable>::new(), unset("", "");
        /// Names.
        names: Vec<String> = List(Plain), unset("none", r#"["a"]"#);
    }
}

impl Table for QueueTable {}

table! {
    /// Bounds.
    struct BoundsTable {
        /// Lowest.
        low: u8 = Integer(0_u8..=9), default(1);
        /// Highest.
        high: u8 = Integer(0_u8..=9), default(2);
    }
}

impl Table for BoundsTable {
    fn validate(&self, section: &Section<'_>) {
        if self.low > self.high {
            section.fault("low", format!("{} is higher than high", section.name("low")));
        }
    }
}

fn node(line: usize, value: Value) -> Node {
    Node { line, value }
}

/// The first key stands on line 2, as below a head.
fn tree(values: Vec<(&str, Value)>) -> Vec<Entry> {
    let entry = |(index, (key, value)): (usize, (&str, Value))| Entry {
        key: key.to_owned(),
        line: index + 2,
        node: node(index + 2, value),
    };
    values.into_iter().enumerate().map(entry).collect()
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn read(entries: &[Entry]) -> (QueueTable, Vec<Fault>) {
    let reader = Reader::default();
    let section = Section::new(&reader, "queue".to_owned(), 1, entries);
    let table = QueueTable::read(&section);
    section.finish();
    (table, reader.into_findings().0)
}

#[test]
fn what_is_not_written_is_as_declared() {
    let (table, faults) = read(&tree(vec![("target", text("there"))]));
    assert_eq!(faults, []);
    let expected = QueueTable { target: "there".to_owned(), ..QueueTable::default() };
    assert_eq!(table, expected);
    assert_eq!((table.capacity, table.wait, table.order), (100, None, 1));
    assert_eq!((table.bounds.low, table.bounds.high), (1, 2));
}

#[test]
fn every_fault_comes_at_its_line() {
    let bounds = Value::Table(tree(vec![("low", Value::Integer(9)), ("hihg", Value::Integer(3))]));
    let (_, faults) = read(&tree(vec![
        ("capacity", Value::Integer(0)),
        ("wait", text("1ms")),
        ("order", text("lats")),
        ("bounds", bounds),
        ("names", Value::List(vec![node(6, text("a")), node(7, Value::Bool(true))])),
        ("capcity", Value::Integer(1)),
    ]));
    let expected = [
        (2, "queue.capacity = 0 is out of range; 1 to 1000 are allowed"),
        (3, "queue.wait: \"1ms\" is too short; at least 1s"),
        (1, "queue has no target; write target = \"here\""),
        (4, "queue.order: \"lats\" is none of first, last; did you mean `last`?"),
        (2, "queue.bounds.low is higher than high"),
        (3, "unknown key `hihg` in [queue.bounds]; did you mean `high`?"),
        (7, "queue.names must be a list, each of it text in quotes, not boolean"),
        (7, "unknown key `capcity` in [queue]; did you mean `capacity`?"),
    ];
    let found: Vec<_> = faults.iter().map(|fault| (fault.line, fault.text.as_str())).collect();
    assert_eq!(found, expected);
}

#[test]
fn documents_say_what_is_declared() {
    let keys = QueueTable::keys();
    assert_eq!(
        commented(&keys, false),
        "# Most things that wait.\ncapacity = 100\n# Longest wait. Default: for ever.\n#wait = \"30s\"\n\
         # Where to.\n#target = \"here\"\n# In which order.\norder = \"first\"\n# Bounds.\n\
         #bounds = { low = 1, high = 2 }\n# Names. Default: none.\n#names = [\"a\"]\n"
    );
    assert!(commented(&keys, true).starts_with("#capacity = 100                   # Most things that wait.\n"));
    let guide = guide_table(&keys, "queue.");
    assert!(guide.contains("| `queue.capacity` | `100` | Most things that wait. More are refused. |\n"), "{guide}");
    assert!(guide.contains("| `queue.target` | required | Where to. |\n"), "{guide}");
    assert!(guide.contains("| `queue.bounds.low` | `1` | Lowest. |\n"), "{guide}");
    let schema = schema_object(&keys);
    assert_eq!(schema["required"], serde_json::json!(["target"]));
    assert_eq!(schema["properties"]["capacity"]["default"], 100);
    assert_eq!(schema["properties"]["bounds"]["properties"]["low"]["maximum"], 9);
    assert_eq!(schema["properties"]["order"]["enum"], serde_json::json!(["first", "last"]));
}
