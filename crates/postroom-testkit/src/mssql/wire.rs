//! The Tabular Data Stream protocol of SQL Server (MS-TDS), as much of it as the driver uses.

use std::time::SystemTime;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// What a client asks for.
pub enum Asked {
    Batch(String),
    Statement(String, Vec<Value>),
}

/// A parameter.
pub enum Value {
    Int(Option<i64>),
    Text(Option<String>),
    Bytes(Option<Vec<u8>>),
    Float(Option<f64>),
}

impl Value {
    pub fn parameter(&self) -> &(dyn ToSql + Sync) {
        match self {
            Self::Int(value) => value,
            Self::Text(value) => value,
            Self::Bytes(value) => value,
            Self::Float(value) => value,
        }
    }

    /// Its type in PostgreSQL.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "bigint",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytea",
            Self::Float(_) => "float8",
        }
    }
}

pub enum Answer {
    Done(u64),
    Rows(Vec<(String, Type)>, Vec<Vec<Value>>),
    Error(u32, String),
}

impl Answer {
    pub fn number(number: i64) -> Self {
        Self::Rows(vec![(String::new(), Type::INT8)], vec![vec![Value::Int(Some(number))]])
    }

    pub fn rows(rows: &[Row]) -> Self {
        let columns = rows.first().map(|row| row.columns()).unwrap_or_default();
        let value = |row: &Row, index: usize| match *row.columns()[index].type_() {
            Type::INT2 => Value::Int(row.get::<_, Option<i16>>(index).map(i64::from)),
            Type::INT4 => Value::Int(row.get::<_, Option<i32>>(index).map(i64::from)),
            Type::INT8 => Value::Int(row.get(index)),
            Type::BYTEA => Value::Bytes(row.get(index)),
            Type::FLOAT8 => Value::Float(row.get(index)),
            Type::TIMESTAMP => {
                let at: Option<SystemTime> = row.get(index);
                Value::Text(at.map(|at| format!("{:?}", at.duration_since(SystemTime::UNIX_EPOCH))))
            }
            _ => Value::Text(row.get(index)),
        };
        let values = rows.iter().map(|row| (0..row.len()).map(|index| value(row, index)).collect());
        Self::Rows(
            columns.iter().map(|column| (column.name().to_owned(), column.type_().clone())).collect(),
            values.collect(),
        )
    }
}

const BATCH: u8 = 1;
const RPC: u8 = 3;
const LOGIN: u8 = 16;
const PRELOGIN: u8 = 18;

pub struct Wire {
    socket: TcpStream,
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, count: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn number(&mut self, bytes: usize) -> u64 {
        let mut all = [0; 8];
        all[..bytes].copy_from_slice(self.take(bytes));
        u64::from_le_bytes(all)
    }

    /// All headers that precede a request.
    fn skip_headers(&mut self) {
        let length = u32::from_le_bytes(self.0[..4].try_into().unwrap()) as usize;
        self.take(length);
    }

    fn partly(&mut self, max: u64) -> Option<Vec<u8>> {
        if max != 0xffff {
            let length = self.number(2);
            return (length != 0xffff).then(|| self.take(length as usize).to_vec());
        }
        if self.number(8) == u64::MAX {
            return None;
        }
        let mut all = Vec::new();
        loop {
            let chunk = self.number(4) as usize;
            if chunk == 0 {
                return Some(all);
            }
            all.extend_from_slice(self.take(chunk));
        }
    }

    fn value(&mut self) -> Value {
        let name = self.number(1) as usize;
        self.take(2 * name + 1);
        match self.number(1) {
            0x1f => Value::Text(None),
            0x26 => {
                self.number(1);
                let length = self.number(1) as usize;
                Value::Int((length > 0).then(|| self.number(length) as i64))
            }
            0xe7 => {
                let max = self.number(2);
                self.take(5);
                Value::Text(self.partly(max).map(|bytes| text(&bytes)))
            }
            0xa5 => {
                let max = self.number(2);
                Value::Bytes(self.partly(max))
            }
            other => panic!("a parameter of the type {other:#x}"),
        }
    }
}

fn text(bytes: &[u8]) -> String {
    let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    String::from_utf16(&units).unwrap()
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

impl Wire {
    pub fn new(socket: TcpStream) -> Self {
        Self { socket }
    }

    async fn message(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            let mut header = [0; 8];
            self.socket.read_exact(&mut header).await.ok()?;
            let mut body = vec![0; usize::from(u16::from_be_bytes([header[2], header[3]])) - 8];
            self.socket.read_exact(&mut body).await.ok()?;
            all.append(&mut body);
            if header[1] & 1 == 1 {
                return Some((header[0], all));
            }
        }
    }

    /// The next request; none: the client is gone.
    pub async fn asked(&mut self) -> Option<Asked> {
        loop {
            let (kind, body) = self.message().await?;
            let mut reader = Reader(&body);
            match kind {
                PRELOGIN => {
                    // Version and encryption: none.
                    let options = [0, 0, 11, 0, 6, 1, 0, 17, 0, 1, 0xff, 16, 0, 0, 0, 0, 0, 2];
                    self.send(&options).await?;
                }
                LOGIN => {
                    let name = utf16("emulation");
                    let mut ack = vec![1, 0x74, 0, 0, 4, (name.len() / 2) as u8];
                    ack.extend(name);
                    ack.extend([16, 0, 0, 0]);
                    let mut all = vec![0xad];
                    all.extend((ack.len() as u16).to_le_bytes());
                    all.extend(ack);
                    done(&mut all, 0xfd, 0, 0);
                    self.send(&all).await?;
                }
                BATCH => {
                    reader.skip_headers();
                    return Some(Asked::Batch(text(reader.0)));
                }
                RPC => {
                    reader.skip_headers();
                    // sp_executesql, and its flags.
                    assert_eq!(reader.take(4), [0xff, 0xff, 10, 0]);
                    reader.take(2);
                    let Value::Text(Some(sql)) = reader.value() else { panic!("a statement that is no text") };
                    reader.value();
                    let mut values = Vec::new();
                    while !reader.0.is_empty() {
                        values.push(reader.value());
                    }
                    return Some(Asked::Statement(sql, values));
                }
                other => panic!("a message of the type {other}"),
            }
        }
    }

    pub async fn answer(&mut self, asked: &Asked, answer: Answer) -> Option<()> {
        let mut all = Vec::new();
        // A batch ends with DONE, a procedure with DONEPROC.
        let end = match asked {
            Asked::Batch(_) => 0xfd,
            Asked::Statement(..) => 0xfe,
        };
        match answer {
            Answer::Done(count) => done(&mut all, end, 0x10, count),
            Answer::Rows(columns, rows) => {
                if !columns.is_empty() {
                    described(&mut all, &columns);
                }
                for row in &rows {
                    all.push(0xd1);
                    row.iter().for_each(|value| encoded(&mut all, value));
                }
                done(&mut all, end, 0x10, rows.len() as u64);
            }
            Answer::Error(number, message) => {
                let message = utf16(&message.chars().take(3000).collect::<String>());
                let mut error = number.to_le_bytes().to_vec();
                error.extend([1, 16]);
                error.extend(((message.len() / 2) as u16).to_le_bytes());
                error.extend(message);
                error.extend([0, 0, 1, 0, 0, 0]);
                all.push(0xaa);
                all.extend((error.len() as u16).to_le_bytes());
                all.extend(error);
                done(&mut all, end, 2, 0);
            }
        }
        self.send(&all).await
    }

    async fn send(&mut self, body: &[u8]) -> Option<()> {
        let mut chunks = body.chunks(4000).peekable();
        while let Some(chunk) = chunks.next() {
            let mut packet = vec![4, u8::from(chunks.peek().is_none())];
            packet.extend(((chunk.len() + 8) as u16).to_be_bytes());
            packet.extend([0, 0, 1, 0]);
            packet.extend_from_slice(chunk);
            self.socket.write_all(&packet).await.ok()?;
        }
        Some(())
    }
}

fn done(all: &mut Vec<u8>, token: u8, status: u16, count: u64) {
    all.push(token);
    all.extend(status.to_le_bytes());
    all.extend([0, 0]);
    all.extend(count.to_le_bytes());
}

fn described(all: &mut Vec<u8>, columns: &[(String, Type)]) {
    all.push(0x81);
    all.extend((columns.len() as u16).to_le_bytes());
    for (name, kind) in columns {
        all.extend([0, 0, 0, 0, 1, 0]);
        match *kind {
            Type::INT2 | Type::INT4 | Type::INT8 => all.extend([0x26, 8]),
            Type::FLOAT8 => all.extend([0x6d, 8]),
            Type::BYTEA => all.extend([0xa5, 0xff, 0xff]),
            _ => all.extend([0xe7, 0xff, 0xff, 9, 4, 0xd0, 0, 0x34]),
        }
        let name = utf16(name);
        all.push((name.len() / 2) as u8);
        all.extend(name);
    }
}

fn encoded(all: &mut Vec<u8>, value: &Value) {
    let bytes = match value {
        Value::Int(None) => return all.push(0),
        Value::Int(Some(value)) => {
            all.push(8);
            return all.extend(value.to_le_bytes());
        }
        Value::Float(None) => return all.push(0),
        Value::Float(Some(value)) => {
            all.push(8);
            return all.extend(value.to_le_bytes());
        }
        Value::Text(value) => value.as_deref().map(utf16),
        Value::Bytes(value) => value.clone(),
    };
    let Some(bytes) = bytes else { return all.extend(u64::MAX.to_le_bytes()) };
    all.extend((bytes.len() as u64).to_le_bytes());
    if !bytes.is_empty() {
        all.extend((bytes.len() as u32).to_le_bytes());
        all.extend(bytes);
    }
    all.extend([0, 0, 0, 0]);
}
