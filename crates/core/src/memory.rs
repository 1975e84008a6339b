//! stub
/// The memory store.
pub struct MemoryStore;
