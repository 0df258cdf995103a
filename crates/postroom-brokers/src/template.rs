//! Pure: names at a broker that are made of a message's fields, such as `orders.{tenant_id}.{type}`.

use postroom::Message;

/// Fields that a template can name.
const FIELDS: [&str; 7] = ["topic", "type", "routing_key", "key", "tenant_id", "aggregate_type", "aggregate_id"];

/// A text with fields of a message in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Field(&'static str),
}

impl Template {
    /// Reads one; or says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find(['{', '}']) {
            let (before, at) = rest.split_at(open);
            let field = at.strip_prefix('{').and_then(|inner| inner.split_once('}'));
            let Some((name, behind)) = field else {
                return Err(format!("{text:?} has a brace that is never closed or never opened"));
            };
            let Some(field) = FIELDS.into_iter().find(|field| *field == name) else {
                return Err(format!("{text:?} names {{{name}}}; the fields are {}", FIELDS.join(", ")));
            };
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(Part::Field(field));
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        if parts.is_empty() {
            return Err("it is empty".to_owned());
        }
        Ok(Self(parts))
    }

    /// The parts that are the same for every message.
    #[cfg(any(feature = "amqp10", feature = "kafka", feature = "mqtt"))]
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Field(_) => None,
        })
    }

    /// The text, where it is the same for every message.
    #[cfg(any(feature = "amqp10", feature = "kafka", feature = "mqtt", feature = "redis"))]
    pub fn fixed(&self) -> Option<&str> {
        match self.0.as_slice() {
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// Whether a message could have this text: it begins and ends as the template does.
    #[cfg(feature = "kafka")]
    pub fn may_be(&self, text: &str) -> bool {
        let starts = !matches!(self.0.first(), Some(Part::Text(start)) if !text.starts_with(start.as_str()));
        let ends = !matches!(self.0.last(), Some(Part::Text(end)) if !text.ends_with(end.as_str()));
        starts && ends
    }

    /// Whether the text differs from message to message.
    #[cfg(any(feature = "amqp10", feature = "http"))]
    pub fn has_fields(&self) -> bool {
        self.0.iter().any(|part| matches!(part, Part::Field(_)))
    }

    /// The text for a message with each field as `encode` writes it; or why there is none.
    #[cfg(any(feature = "amqp10", feature = "http"))]
    pub fn encoded(&self, message: &Message, encode: impl Fn(&str) -> Option<String>) -> Result<String, String> {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(part) => text.push_str(part),
                Part::Field(field) => {
                    let value = value(message, field).filter(|value| !value.is_empty());
                    let value =
                        value.ok_or_else(|| format!("needs the field {field} of the message, and it has none"))?;
                    text.push_str(
                        &encode(value)
                            .ok_or_else(|| format!("cannot have {value:?} in it, the field {field} of the message"))?,
                    );
                }
            }
        }
        Ok(text)
    }

    /// The text for a message; or the field that it needs and that the message does not have.
    pub fn of(&self, message: &Message) -> Result<String, &'static str> {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(part) => text.push_str(part),
                Part::Field(field) => {
                    text.push_str(value(message, field).filter(|value| !value.is_empty()).ok_or(*field)?)
                }
            }
        }
        Ok(text)
    }
}

fn value<'m>(message: &'m Message, field: &str) -> Option<&'m str> {
    match field {
        "topic" => Some(&message.topic),
        "type" => Some(&message.kind),
        // The address at a broker: the routing key, else the type.
        "routing_key" => Some(message.address()),
        "key" => message.ordering_key(),
        "tenant_id" => message.tenant_id.as_deref(),
        "aggregate_type" => message.aggregate_type.as_deref(),
        "aggregate_id" => message.aggregate_id.as_deref(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_put_in_and_a_missing_one_is_told() {
        let message = Message::new("orders", "order.placed", "x").tenant("t1");
        let of = |text| Template::parse(text).unwrap().of(&message);
        assert_eq!(of("shop.{tenant_id}.{type}").unwrap(), "shop.t1.order.placed");
        assert_eq!(of("{routing_key}").unwrap(), "order.placed");
        assert_eq!(of("plain").unwrap(), "plain");
        assert_eq!(of("{aggregate_id}"), Err("aggregate_id"));
        for (text, problem) in [("{tenant}", "the fields are"), ("{type", "brace"), ("a}", "brace"), ("", "empty")] {
            assert!(Template::parse(text).unwrap_err().contains(problem), "{text}");
        }
    }
}
