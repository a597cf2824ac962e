//! What several servers share: token lists read entry by entry (`listing`), and messages from the parts that other APIs
//! have (`said`). Neither uses the other.

pub(super) mod listing;
pub(super) mod said;
