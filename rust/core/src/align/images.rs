//! Where the pictures of a set stand among its tokens: flat lists of places beside the columns.
//!
//! `pictures` has put their keys into branches; here the keys are taken out again, branch by branch.

use super::branch::Branch;
use super::pictures::Keyed;
use std::collections::HashMap;

/// Places of pictures: shapes as in `pictures.Images` of Python.
#[derive(Debug, Default)]
pub struct Images {
    /// How many places each branch has.
    pub counts: Vec<u32>,
    /// How many features each place has.
    pub features: Vec<u32>,
    /// The token of each feature, counted in its branch.
    pub at: Vec<i32>,
    /// Row of each place in `digests`.
    pub picture: Vec<i32>,
    /// blake3 of each distinct picture.
    pub digests: Vec<[u8; 32]>,
    /// Pixels from left to right and from top to bottom.
    pub sizes: Vec<[u32; 2]>,
    rows: HashMap<[u8; 32], i32>,
}

impl Images {
    /// Takes the keys out of the branches of a trace.
    pub(super) fn push(&mut self, keyed: Option<&Keyed<'_>>, branches: &mut [Branch<'_>]) {
        for branch in branches {
            let spans = keyed.map(|keyed| keyed.unkey(branch)).unwrap_or_default();
            self.counts.push(spans.len() as u32);
            for (span, picture) in
                spans.iter().filter_map(|span| Some((span, keyed?.trace.pictures.get(span.picture)?)))
            {
                let next = self.digests.len() as i32;
                let row = *self.rows.entry(picture.digest).or_insert(next);
                if row == next {
                    self.digests.push(picture.digest);
                    self.sizes.push([picture.width, picture.height]);
                }
                self.picture.push(row);
                self.features.push(span.at.len() as u32);
                self.at.extend(span.at.iter().map(|&token| token as i32));
            }
        }
    }
}
