//! Pure: the keys of a struct that serde reads, so that no list of them is kept by hand.

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::forward_to_deserialize_any;

/// The names of the fields of `T`, as serde reads them; none where it is no struct.
pub(crate) fn keys_of<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    match T::deserialize(Asked) {
        Err(Fields(fields)) => fields,
        Ok(_) => &[],
    }
}

/// Answers the question for a struct's fields with an error that carries them.
struct Asked;

#[derive(Debug, Default, thiserror::Error)]
#[error("the fields are {0:?}")]
struct Fields(&'static [&'static str]);

impl Error for Fields {
    fn custom<T: std::fmt::Display>(_: T) -> Self {
        Self::default()
    }
}

impl<'de> Deserializer<'de> for Asked {
    type Error = Fields;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Fields> {
        Err(Fields::default())
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Fields> {
        Err(Fields(fields))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
