//! A table with every kind of key, read with faults.

use std::time::Duration;

use super::*;

table! {
    /// Everything.
    struct FileTable {
        /// Things that wait.
        queue: QueueTable = nested::<QueueTable>();
    }
}

table! {
    /// Things that wait.
    #[derive(PartialEq)]
    struct QueueTable {
        /// Most things that wait.
        ///
        /// More are refused.
        capacity: usize = integer(1_usize..=1_000), default(100);
        /// Longest wait.
        wait: Option<Duration> = duration(Duration::from_secs(1)), unset("for ever", r#""30s""#);
        /// Where to.
        target: String = text(|text| Ok(text.to_owned())), required(r#""here""#);
        /// In which order.
        order: u8 = words([("first", 1), ("last", 2)]), default("first");
        /// Bounds.
        bounds: BoundsTable = nested::<BoundsTable>();
        /// Names.
        names: Vec<String> = list(text(|text| Ok(text.to_owned()))), unset("none", r#"["a"]"#);
        /// Labels.
        labels: Vec<(String, bool)> = entries(|name| Ok(name.to_owned()), boolean());
    }
}

table! {
    /// Bounds.
    #[derive(PartialEq)]
    #[check(check)]
    struct BoundsTable {
        /// Lowest.
        low: u8 = integer(0_u8..=9), default(1);
        /// Highest.
        high: u8 = integer(0_u8..=9), default(2);
    }
}

impl BoundsTable {
    fn check(&self, section: &Section<'_>) {
        if self.low > self.high {
            section.fault("low", format!("{} is higher than high", section.name("low")));
        }
    }
}

fn read_queue(keys: &str) -> Result<QueueTable, Vec<String>> {
    let options = ReadOptions { file: "f", ..ReadOptions::none() };
    match read::<FileTable>(&format!("[queue]\n{keys}"), options) {
        Ok((file, _)) => Ok(file.queue),
        Err(faults) => Err(faults.to_string().lines().map(str::to_owned).collect()),
    }
}

#[test]
fn what_is_not_written_is_as_declared() {
    let table = read_queue("target = \"there\"").expect("right");
    let expected = QueueTable { target: "there".to_owned(), ..QueueTable::default() };
    assert_eq!(table, expected);
    assert_eq!((table.capacity, table.wait, table.order), (100, None, 1));
    assert_eq!((table.bounds.low, table.bounds.high), (1, 2));
    let written = "target = \"\"\ncapacity = 0xF\nwait = \"1m\"\nnames = [\"a\", \"b\"]\nlabels = { x = true }";
    let table = read_queue(written).expect("right");
    assert_eq!((table.capacity, table.wait), (15, Some(Duration::from_secs(60))));
    assert_eq!((table.names.len(), table.labels), (2, vec![("x".to_owned(), true)]));
}

#[test]
fn every_fault_comes_at_its_line() {
    let faults = read_queue(
        "capacity = 0\nwait = \"1ms\"\norder = \"lats\"\nnames = [\"a\",\ntrue]\ncapcity = 1\nlabels = { x = 1 }\n\
         [queue.bounds]\nlow = 9\nhihg = 3",
    );
    let expected = [
        "f:1: queue has no target; write target = \"here\"",
        "f:2: queue.capacity = 0 is out of range; 1 to 1000 are allowed",
        "f:3: queue.wait: \"1ms\" is too short; at least 1s",
        "f:4: queue.order: \"lats\" is none of first, last; did you mean `last`?",
        "f:6: queue.names must be a list, each item text in quotes, not boolean",
        "f:7: unknown key `capcity` in [queue]; did you mean `capacity`?",
        "f:8: queue.labels.x must be true or false, not integer",
        "f:10: queue.bounds.low is higher than high",
        "f:11: unknown key `hihg` in [queue.bounds]; did you mean `high`?",
    ];
    assert_eq!(faults.expect_err("faults"), expected);
}

#[test]
fn a_fault_is_one_line_whatever_is_written() {
    let beyond = "9".repeat(45);
    let keys = format!("target = \"x\"\nlabels = {{ \"a\\nb\" = 1 }}\n\"wait\\n\" = 1\ncapacity = {beyond}");
    let expected = [
        "f:3: queue.labels.a\\nb must be true or false, not integer",
        "f:4: unknown key `wait\\n` in [queue]; did you mean `wait`?",
        "f:5: queue.capacity is out of range; 1 to 1000 are allowed",
    ];
    assert_eq!(read_queue(&keys).expect_err("faults"), expected);
}

#[test]
fn documents_say_what_is_declared() {
    let keys = FileTable::keys();
    assert_eq!(
        commented_file(&keys),
        "\n[queue]\n# Most things that wait.\ncapacity = 100\n# Longest wait. Default: for ever.\n#wait = \"30s\"\n\
         # Where to. Required.\n#target = \"here\"\n# In which order.\norder = \"first\"\n# Bounds.\n\
         #bounds = { low = 1, high = 2 }\n# Names. Default: none.\n#names = [\"a\"]\n# More keys: labels.\n"
    );
    let guide = guide_table(&keys, "queue").expect("it is there");
    assert!(guide.contains("| `capacity` | `100` | Most things that wait. More are refused. |\n"), "{guide}");
    assert!(guide.contains("| `target` | required | Where to. |\n"), "{guide}");
    assert!(guide.contains("| `bounds.low` | `1` | Lowest. |\n"), "{guide}");
    let schema = &json_schema("f", &keys)["properties"]["queue"];
    assert_eq!(schema["required"], serde_json::json!(["target"]));
    assert_eq!(schema["properties"]["capacity"]["default"], 100);
    assert_eq!(schema["properties"]["bounds"]["properties"]["low"]["maximum"], 9);
    assert_eq!(schema["properties"]["order"]["enum"], serde_json::json!(["first", "last"]));
}
