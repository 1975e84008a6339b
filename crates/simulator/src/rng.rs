//! Random numbers from a seed: SplitMix64, the same on every machine and with every compiler.

/// A sequence that a seed repeats.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give shifted copies of one sequence.
        let mut mixer = Self(seed ^ 0x5DEE_CE66_D1CE_4E5B);
        Self(mixer.draw() ^ seed.rotate_left(32))
    }

    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns one of `0..count`.
    pub(crate) fn below(&mut self, count: u64) -> u64 {
        self.draw() % count.max(1)
    }

    /// Returns one of `low..=high`.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub(crate) fn percent(&mut self, part: u64) -> bool {
        self.below(100) < part
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}
