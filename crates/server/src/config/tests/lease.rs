//! `[lease]`.

use super::{fault, faults, parse};

#[test]
fn the_store_leases_lanes_unless_the_file_says_otherwise() {
    for text in ["", "[lease]\ntype = \"store\"\n"] {
        assert!(parse(text).expect("right").lease.is_store_alone(), "{text}");
    }
    assert!(fault("[lease]\n").contains("lease has no type; write type = \"store\""));
    assert!(fault("[lease]\ntype = \"store\"\nurl = \"redis://h\"\n").contains("unknown key `url`"));
    assert!(fault("[lease]\ntype = \"rediss\"\n").contains("\"rediss\" is no lease"));
    let meant = if cfg!(feature = "redis") { "redis" } else { "store" };
    assert!(fault("[lease]\nurl = \"redis://h\"\n").contains(&format!("write type = {meant:?}")));
    if !cfg!(feature = "redis") {
        let fault = fault("[lease]\ntype = \"redis\"\nurl = \"redis://h\"\n");
        assert!(fault.contains("was built without \"redis\""), "{fault}");
    }
}

#[test]
#[cfg(feature = "redis")]
fn a_lease_in_redis_has_its_keys() {
    let lease = |keys: &str| format!("[lease]\ntype = \"redis\"\n{keys}\n");
    for right in [
        "url = \"redis://127.0.0.1:6379\"",
        "url = \"rediss+sentinel://a:26379,b:26379/main\"\nprefix = \"acme:eu\"\ntls = { ca_file = \"ca.pem\" }",
    ] {
        assert!(!parse(&lease(right)).expect("right").lease.is_store_alone(), "{right}");
    }
    assert!(fault(&lease("")).contains("lease.url is missing") || fault(&lease("")).contains("lease has no url"));
    assert!(fault(&lease("url = \"redis://h\"\nprefx = \"a\"")).contains("did you mean `prefix`?"));
    assert!(fault(&lease("url = \"redis://h\"\nprefix = \"{a}\"")).contains("is no prefix"));
    let wrong = faults(&lease("url = \"redis://u:hunter2@h\"\nuser = \"env:HUNTER2\"")).join("\n");
    assert!(wrong.contains("give them as user and password") && !wrong.contains("hunter2"), "{wrong}");
}
