//! Which of several databases a message is written to, with the business rows that it belongs to.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use sha2::{Digest, Sha256};
use thiserror::Error;

/// Databases among which an application shares its rows out by key, and the rule by which it does so: look for the database first, then begin
/// the transaction there and write the message in it. `S` is whatever the application writes through: a pool, a URL.
///
/// Guarantee: one key is always in one database, so its messages keep their order, as long as the names and the rule stay the same. Limit: where a
/// rule changes, keys move; messages of a key that wait in its former database may then be sent after those in its new one. Let them be
/// sent before the first writer follows the new rule.
pub struct Shards<S> {
    shards: BTreeMap<String, S>,
    rule: Rule,
}

type Choose = Box<dyn Fn(&str) -> String + Send + Sync>;

enum Rule {
    Rendezvous,
    Map { names: HashMap<String, String>, otherwise: Option<String> },
    Function(Choose),
}

/// What is wrong with a list of databases.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidShards {
    /// There is none.
    #[error("there are no shards; name at least one")]
    None,
    /// A name is empty, or has NUL in it.
    #[error("the name of a shard {0:?} is empty or contains NUL")]
    Name(String),
    /// A name is there twice.
    #[error("two shards are named {0:?}; keys are shared out by name")]
    Twice(String),
    /// A map names one that is not there.
    #[error("the map names the shard {0:?}, which is not there")]
    Unknown(String),
}

/// No database has this key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoShard {
    /// The map does not have the key, and no shard for all others.
    #[error("the map has no shard for this key; add it, or name a shard for all other keys")]
    NotInMap,
    /// The function named one that is not there.
    #[error("the function chose the shard {0:?}, which is not there")]
    Unknown(String),
}

impl<S> Shards<S> {
    /// Shared out evenly by a hash of name and key. A shard that is added takes its part of the keys from all others, and no key moves between
    /// those.
    ///
    /// The database of a key is the one whose name has the highest score, which is the first eight bytes, as a number with the highest first, of
    /// `SHA-256(name || 0x00 || key)`: rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
    /// IEEE/ACM Transactions on Networking 6(1), 1998). Other languages can compute the same.
    ///
    /// # Errors
    /// Without shards, and when a name is wrong or there twice.
    pub fn by_hash(shards: impl IntoIterator<Item = (String, S)>) -> Result<Self, InvalidShards> {
        Self::new(shards, Rule::Rendezvous)
    }

    /// Each key as this map of keys to names says; those that it does not have go to `otherwise`.
    ///
    /// # Errors
    /// Without shards, when a name is wrong or there twice, and when the map names one that is not there.
    pub fn by_map(
        shards: impl IntoIterator<Item = (String, S)>,
        names: HashMap<String, String>,
        otherwise: Option<String>,
    ) -> Result<Self, InvalidShards> {
        let made = Self::new(shards, Rule::Rendezvous)?;
        if let Some(unknown) = names.values().chain(&otherwise).find(|name| !made.shards.contains_key(*name)) {
            return Err(InvalidShards::Unknown(unknown.clone()));
        }
        Ok(Self { rule: Rule::Map { names, otherwise }, ..made })
    }

    /// Each key as this function says, which returns a shard's name. It must return the same one for the same key, in every process.
    ///
    /// # Errors
    /// Without shards, and when a name is wrong or there twice.
    pub fn by_function(
        shards: impl IntoIterator<Item = (String, S)>,
        choose: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> Result<Self, InvalidShards> {
        Self::new(shards, Rule::Function(Box::new(choose)))
    }

    fn new(given: impl IntoIterator<Item = (String, S)>, rule: Rule) -> Result<Self, InvalidShards> {
        let mut shards = BTreeMap::new();
        for (name, shard) in given {
            if name.is_empty() || name.contains('\0') {
                return Err(InvalidShards::Name(name));
            }
            if shards.insert(name.clone(), shard).is_some() {
                return Err(InvalidShards::Twice(name));
            }
        }
        if shards.is_empty() { Err(InvalidShards::None) } else { Ok(Self { shards, rule }) }
    }

    /// The database of a key, and its name.
    ///
    /// # Errors
    /// When the map does not have the key, or the function names a database that is not there.
    pub fn of(&self, key: &str) -> Result<(&str, &S), NoShard> {
        let found = |name: &str| self.shards.get_key_value(name).map(|(name, shard)| (name.as_str(), shard));
        match &self.rule {
            Rule::Rendezvous => {
                let all = self.shards.iter().map(|(name, shard)| (name.as_str(), shard));
                // Of two that score the same, the first by name.
                let best = all.rev().max_by_key(|(name, _)| score(name, key));
                best.ok_or(NoShard::NotInMap)
            }
            Rule::Map { names, otherwise } => {
                let name = names.get(key).or(otherwise.as_ref()).ok_or(NoShard::NotInMap)?;
                found(name).ok_or_else(|| NoShard::Unknown(name.clone()))
            }
            Rule::Function(choose) => {
                let name = choose(key);
                found(&name).ok_or(NoShard::Unknown(name))
            }
        }
    }

    /// All of them with their names, in the order of those.
    pub fn all(&self) -> impl Iterator<Item = (&str, &S)> {
        self.shards.iter().map(|(name, shard)| (name.as_str(), shard))
    }
}

impl<S> fmt::Debug for Shards<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What they are may have passwords in it.
        f.debug_set().entries(self.shards.keys()).finish()
    }
}

fn score(name: &str, key: &str) -> u64 {
    let digest = Sha256::new().chain_update(name.as_bytes()).chain_update([0]).chain_update(key.as_bytes()).finalize();
    digest.iter().take(8).fold(0, |score, byte| score << 8 | u64::from(*byte))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> Vec<(String, usize)> {
        names.iter().enumerate().map(|(place, name)| ((*name).to_owned(), place)).collect()
    }

    fn chosen(shards: &Shards<usize>, keys: usize) -> Vec<String> {
        (0..keys).map(|n| shards.of(&format!("user-{n}")).unwrap().0.to_owned()).collect()
    }

    #[test]
    fn keys_are_shared_out_evenly_and_move_only_to_what_is_new() {
        let four = chosen(&Shards::by_hash(named(&["a", "b", "c", "d"])).unwrap(), 8_000);
        for name in ["a", "b", "c", "d"] {
            let part = four.iter().filter(|chosen| *chosen == name).count();
            assert!((1_800..2_200).contains(&part), "{name}: {part} of 8000");
        }
        let five = chosen(&Shards::by_hash(named(&["e", "d", "c", "b", "a"])).unwrap(), 8_000);
        let moved = four.iter().zip(&five).filter(|(before, after)| before != after);
        assert!(moved.clone().all(|(_, after)| after == "e"), "none moves between those that were there");
        assert!((1_400..1_800).contains(&moved.count()));
    }

    /// These may never change: keys would move. Computed with `sha256sum`.
    #[test]
    fn the_rule_is_the_documented_one() {
        assert_eq!(score("db-0", "user-1"), 0xb161_c115_ff43_e9dd);
        assert_eq!(score("db-1", "user-1"), 0x84bb_8fe9_a391_7bb3);
    }

    #[test]
    fn a_map_and_a_function_are_followed_and_never_guess() {
        let map = HashMap::from([("acme".to_owned(), "eu".to_owned())]);
        let strict = Shards::by_map(named(&["eu", "us"]), map.clone(), None).unwrap();
        assert_eq!(strict.of("acme"), Ok(("eu", &0)));
        assert_eq!(strict.of("other"), Err(NoShard::NotInMap));
        let open = Shards::by_map(named(&["eu", "us"]), map.clone(), Some("us".to_owned())).unwrap();
        assert_eq!(open.of("other"), Ok(("us", &1)));
        let wrong = Shards::by_map(named(&["us"]), map, None).unwrap_err();
        assert_eq!(wrong, InvalidShards::Unknown("eu".to_owned()));
        let by = Shards::by_function(named(&["db-0", "db-1"]), |key| format!("db-{}", key.len() % 3)).unwrap();
        assert_eq!(by.of("abcd"), Ok(("db-1", &1)));
        assert_eq!(by.of("ab"), Err(NoShard::Unknown("db-2".to_owned())));
    }

    #[test]
    fn a_wrong_list_is_refused() {
        assert_eq!(Shards::by_hash(named(&[])).unwrap_err(), InvalidShards::None);
        assert_eq!(Shards::by_hash(named(&["a", "a"])).unwrap_err(), InvalidShards::Twice("a".to_owned()));
        assert_eq!(Shards::by_hash(named(&["a", ""])).unwrap_err(), InvalidShards::Name(String::new()));
        assert_eq!(format!("{:?}", Shards::by_hash(named(&["b", "a"])).unwrap()), r#"{"a", "b"}"#);
    }
}
