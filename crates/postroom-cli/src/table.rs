//! Tables and numbers for people. Pure.

pub use postroom::lasting as duration;
use unicode_width::UnicodeWidthStr;

use crate::say::printable;

/// How a column is aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Rows under heads; columns are as wide as their widest cell.
pub struct Table {
    heads: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A head that begins with `>` is of a column that is aligned to the right.
    pub fn new(heads: &[&'static str]) -> Self {
        let head = |head: &&'static str| match head.strip_prefix('>') {
            Some(head) => (head, Align::Right),
            None => (*head, Align::Left),
        };
        Self { heads: heads.iter().map(head).collect(), rows: Vec::new() }
    }

    /// A cell may hold whatever others wrote: what a terminal would obey is spelled out.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let cells = cells.into_iter().map(|cell| printable(&cell.into()).replace('\t', " "));
        self.rows.push(cells.collect());
    }

    /// One line a row, the heads first.
    pub fn lines(&self) -> Vec<String> {
        let heads: Vec<String> = self.heads.iter().map(|(head, _)| (*head).to_owned()).collect();
        let all = || std::iter::once(&heads).chain(&self.rows);
        let cell = |row: &Vec<String>, column: usize| row.get(column).map_or(0, |cell| cell.width());
        let widths: Vec<usize> =
            (0..heads.len()).map(|column| all().map(|row| cell(row, column)).max().unwrap_or_default()).collect();
        all().map(|row| self.line(row, &widths)).collect()
    }

    fn line(&self, row: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for ((cell, width), (_, align)) in row.iter().zip(widths).zip(&self.heads) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            let blank = " ".repeat(width.saturating_sub(cell.width()));
            match align {
                Align::Left => line.extend([cell.as_str(), &blank]),
                Align::Right => line.extend([&blank, cell.as_str()]),
            }
        }
        line.trim_end().to_owned()
    }
}

/// `1 message`, `2 messages`, `1,000+ messages`.
pub fn counted(count: i64, at_least: bool, noun: &str) -> String {
    let plural = if count == 1 && !at_least { "" } else { "s" };
    format!("{} {noun}{plural}", number(count, at_least))
}

/// With separators between thousands; `+` where there are at least so many.
pub fn number(count: i64, at_least: bool) -> String {
    let digits = count.unsigned_abs().to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    format!("{}{text}{}", if count < 0 { "-" } else { "" }, if at_least { "+" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_even_on_a_terminal() {
        let mut table = Table::new(&["key", ">messages"]);
        table.row(["\u{6f22}\u{5b57}", "7"]);
        table.row(["o-17", "1,200"]);
        table.row(["evil\u{1b}[31m", "1"]);
        let lines = table.lines();
        assert_eq!(lines[0], "key             messages");
        assert_eq!(lines[1], "\u{6f22}\u{5b57}                   7");
        assert_eq!(lines[2], "o-17               1,200");
        assert_eq!(lines[3], "evil\\u{1b}[31m         1");
    }

    #[test]
    fn numbers_are_as_people_say_them() {
        assert_eq!(counted(1, false, "message"), "1 message");
        assert_eq!(counted(1, true, "message"), "1+ messages");
        assert_eq!(counted(0, false, "key"), "0 keys");
        assert_eq!(number(1_234_567, false), "1,234,567");
    }
}
