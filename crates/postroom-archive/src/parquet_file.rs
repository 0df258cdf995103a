//! The same messages as a Parquet file, for programs that analyse them; what is restored comes from the lines.

use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, FixedLenByteArray, FixedLenByteArrayType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use postroom::ArchivedMessage;

/// `unreadable` names the columns whose text is not UTF-8 and is therefore not exact here; their bytes are in the lines.
const SCHEMA: &str = "message postroom_outbox {
    required int64 seq;
    required fixed_len_byte_array(16) id (uuid);
    required int64 occurred_at (timestamp(micros, true));
    required binary topic (string);
    required binary type (string);
    required binary payload;
    optional binary key (string);
    optional binary routing_key (string);
    required binary content_type (string);
    optional binary headers (string);
    optional binary tenant_id (string);
    optional binary aggregate_type (string);
    optional binary aggregate_id (string);
    optional int64 aggregate_version;
    optional binary unreadable (string);
}";
const LEVEL: i32 = 3;

/// One column of all messages.
enum Column {
    Number(Vec<Option<i64>>),
    Id(Vec<Option<FixedLenByteArray>>),
    Text(Vec<Option<ByteArray>>),
}

/// The columns in the order of the schema.
fn columns(messages: &[ArchivedMessage]) -> Vec<Column> {
    let number = |of: fn(&ArchivedMessage) -> Option<i64>| Column::Number(messages.iter().map(of).collect());
    let text = |of: fn(&ArchivedMessage) -> Option<&str>| {
        Column::Text(messages.iter().map(|message| of(message).map(ByteArray::from)).collect())
    };
    let id = |message: &ArchivedMessage| Some(ByteArray::from(message.id.as_bytes().to_vec()).into());
    let payload = |message: &ArchivedMessage| Some(ByteArray::from(message.payload.clone()));
    let unreadable = |message: &ArchivedMessage| {
        let names: Vec<&str> = message.unreadable.keys().map(String::as_str).collect();
        (!names.is_empty()).then(|| ByteArray::from(names.join(",").as_str()))
    };
    vec![
        number(|message| Some(message.seq)),
        Column::Id(messages.iter().map(id).collect()),
        number(|message| Some(message.occurred_us)),
        text(|message| Some(&message.topic)),
        text(|message| Some(&message.kind)),
        Column::Text(messages.iter().map(payload).collect()),
        text(|message| message.key.as_deref()),
        text(|message| message.routing_key.as_deref()),
        text(|message| Some(&message.content_type)),
        text(|message| message.headers.as_deref()),
        text(|message| message.tenant_id.as_deref()),
        text(|message| message.aggregate_type.as_deref()),
        text(|message| message.aggregate_id.as_deref()),
        number(|message| message.aggregate_version),
        Column::Text(messages.iter().map(unreadable).collect()),
    ]
}

/// The file.
pub(crate) fn write(messages: &[ArchivedMessage]) -> Result<Vec<u8>, ParquetError> {
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let properties = WriterProperties::builder()
        .set_created_by(concat!("postroom ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(LEVEL)?))
        .build();
    let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties))?;
    let mut group = file.next_row_group()?;
    for column in columns(messages) {
        match column {
            Column::Number(values) => append::<Int64Type>(&mut group, values)?,
            Column::Id(values) => append::<FixedLenByteArrayType>(&mut group, values)?,
            Column::Text(values) => append::<ByteArrayType>(&mut group, values)?,
        }
    }
    group.close()?;
    file.into_inner()
}

fn append<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, Vec<u8>>,
    values: Vec<Option<T::T>>,
) -> Result<(), ParquetError> {
    let mut column =
        group.next_column()?.ok_or_else(|| ParquetError::General("the schema has fewer columns".to_owned()))?;
    let levels: Vec<i16> = values.iter().map(|value| i16::from(value.is_some())).collect();
    let present: Vec<T::T> = values.into_iter().flatten().collect();
    column.typed::<T>().write_batch(&present, Some(&levels), None)?;
    column.close()
}

/// Whether the file has these messages and no others, in this order. The library may panic over bytes that it did not write, so this is
/// called after the SHA-256 was compared, and on a task of its own.
pub(crate) fn has(bytes: Bytes, messages: &[ArchivedMessage]) -> Result<bool, ParquetError> {
    let file = SerializedFileReader::new(bytes)?;
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    if file.metadata().file_metadata().schema_descr().root_schema_ptr() != schema || file.num_row_groups() != 1 {
        return Ok(false);
    }
    let group = file.get_row_group(0)?;
    for (at, column) in columns(messages).into_iter().enumerate() {
        let same = match column {
            Column::Number(values) => read::<Int64Type>(group.as_ref(), at, values.len())? == values,
            Column::Id(values) => read::<FixedLenByteArrayType>(group.as_ref(), at, values.len())? == values,
            Column::Text(values) => read::<ByteArrayType>(group.as_ref(), at, values.len())? == values,
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The values of a column; one more than expected, if it has more.
fn read<T: DataType>(
    group: &dyn RowGroupReader,
    at: usize,
    expected: usize,
) -> Result<Vec<Option<T::T>>, ParquetError> {
    let mut column = parquet::column::reader::get_typed_column_reader::<T>(group.get_column_reader(at)?);
    let (mut present, mut levels, mut all) = (Vec::new(), Vec::new(), 0);
    while all <= expected {
        let (rows, _, _) = column.read_records(expected + 1 - all, Some(&mut levels), None, &mut present)?;
        if rows == 0 {
            break;
        }
        all += rows;
    }
    // A column in which nothing may be null has no levels.
    if levels.is_empty() {
        return Ok(present.into_iter().map(Some).collect());
    }
    let mut present = present.into_iter();
    Ok(levels.into_iter().map(|level| if level > 0 { present.next() } else { None }).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn messages() -> Vec<ArchivedMessage> {
        let plain = ArchivedMessage { seq: 1, id: Uuid::from_u128(1), ..ArchivedMessage::default() };
        let full = ArchivedMessage {
            seq: i64::MAX,
            id: Uuid::from_u128(u128::MAX),
            topic: "orders".to_owned(),
            kind: "order.placed".to_owned(),
            payload: vec![0, 255, 10].into(),
            key: Some("größe".to_owned()),
            routing_key: Some(String::new()),
            content_type: "application/json".to_owned(),
            headers: Some("{\"a\":1}".to_owned()),
            tenant_id: Some("acme".to_owned()),
            aggregate_type: Some("order".to_owned()),
            aggregate_id: Some("4711".to_owned()),
            aggregate_version: Some(i64::MIN),
            occurred_us: -1,
            unreadable: [("topic".to_owned(), Bytes::from_static(&[255]))].into(),
        };
        vec![plain.clone(), full, plain]
    }

    #[test]
    fn what_is_written_is_read_and_anything_else_is_not_the_same() {
        let bytes = Bytes::from(write(&messages()).unwrap());
        assert!(has(bytes.clone(), &messages()).unwrap());
        assert!(!has(bytes.clone(), &messages()[..2]).unwrap(), "it has one more");
        let more = [messages(), messages()].concat();
        assert!(!has(bytes.clone(), &more).unwrap(), "it has fewer");
        let changed: [fn(&mut ArchivedMessage); 5] = [
            |message| message.seq = 2,
            |message| message.payload = vec![0].into(),
            |message| message.key = None,
            |message| message.routing_key = None,
            |message| message.occurred_us = 0,
        ];
        for change in changed {
            let mut other = messages();
            change(&mut other[1]);
            assert!(!has(bytes.clone(), &other).unwrap());
        }
    }
}
