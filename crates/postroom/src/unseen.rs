//! Pure: characters that are not seen, and change what is.

/// Whether a terminal obeys this character, or a reader does not see it: control and formatting characters (Unicode's categories Cc and
/// Cf, and the two separators of lines). Text from others is shown without them.
pub fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
            | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0001}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_stays() {
        for c in "aé漢🙂\u{301} \u{a0}-".chars() {
            assert!(!is_unseen(c), "{c:?}");
        }
        for c in "\0\t\u{1b}\u{9b}\u{ad}\u{200b}\u{202e}\u{2066}\u{feff}\u{e0041}".chars() {
            assert!(is_unseen(c), "{c:?}");
        }
    }
}
