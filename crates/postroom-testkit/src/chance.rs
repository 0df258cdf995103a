//! Seeded chance for workloads (xorshift64*, Vigna 2016): a failing test prints its seed and can be run again with it.

/// A generator.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// From a seed; any number will do.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`; zero when there is none.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.number() >> 11) % bound.max(1)
    }

    /// True in `percent` of a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// An index into `weights`, each as often as its weight says; zero when there are none.
    pub fn one_of(&mut self, weights: &[u64]) -> usize {
        let mut rest = self.below(weights.iter().sum());
        for (index, weight) in weights.iter().enumerate() {
            match rest.checked_sub(*weight) {
                Some(less) => rest = less,
                None => return index,
            }
        }
        0
    }
}
