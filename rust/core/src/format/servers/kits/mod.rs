//! What several servers share: token lists cut in two (`cut`), and messages from the parts that other APIs have (`said`).
//! Neither uses the other.

pub(super) mod cut;
pub(super) mod said;
