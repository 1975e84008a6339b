//! `postbox config schema`: the JSON Schema of the configuration, for editors.

use crate::failure::Failure;
use crate::output;

pub(super) fn schema() -> Result<(), Failure> {
    output::json(&postbox_server::json_schema())
}
