//! What several recorders share: of rows (`columns`, `masked`), of messages (`talk`, `openai`), of spans (`attributes`),
//! of records that hold other records (`splice`). The files, each using those before it alone: `literal`, `columns`,
//! `masked`, `openai`, `splice`, `talk`, `attributes`.

pub(super) mod attributes;
pub(super) mod columns;
mod literal;
pub(super) mod masked;
pub(super) mod openai;
pub(super) mod splice;
pub(super) mod talk;
