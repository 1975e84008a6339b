//! `postbox config schema`: the JSON Schema of the configuration, for editors.

use crate::output;

pub(super) fn schema() {
    output::json(&postbox_server::json_schema());
}
