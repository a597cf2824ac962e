//! JSON values that are kept as they are: messages, tools, metadata.

use super::cursor::Cursor;
use serde_json::{Map, Value};

/// Keys for which room is made at once: as many as messages have.
pub(super) const FEW: usize = 4;

impl Cursor<'_> {
    pub fn value(&mut self) -> Option<Value> {
        Some(match self.peek() {
            b'"' => Value::String(self.unquoted()?.to_owned()),
            b'{' => Value::Object(self.map()?),
            b'[' => {
                let mut items = Vec::new();
                self.list(|cursor| cursor.value().map(|item| items.push(item)))?;
                Value::Array(items)
            }
            b't' => self.word(b"true").map(|()| Value::Bool(true))?,
            b'f' => self.word(b"false").map(|()| Value::Bool(false))?,
            b'n' => self.word(b"null").map(|()| Value::Null)?,
            _ => match self.number_value() {
                Some(number) => number,
                None => self.bare()?.into(),
            },
        })
    }

    fn map(&mut self) -> Option<Map<String, Value>> {
        let mut map = Map::new();
        self.members(|cursor, key| {
            let value = cursor.value()?;
            if map.is_empty() {
                map = Map::with_capacity(FEW);
            }
            map.insert(key.into_owned(), value);
            Some(())
        })?;
        Some(map)
    }
}
