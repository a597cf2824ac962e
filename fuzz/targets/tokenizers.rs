//! A tokenizer.json, and after its last zero byte a text: for any bytes, loading and encoding end, and
//! `tokenizer::check_invariants` finds nothing.
#![no_main]

mod watched;

use libfuzzer_sys::fuzz_target;
use tracegrad_core::tokenizer;

fuzz_target!(|data: &[u8]| {
    let cut = data.iter().rposition(|&byte| byte == 0).unwrap_or(data.len());
    let text = data.get(cut + 1..).unwrap_or(b"Hello, world! \xe4\xb8\x96 <a>");
    watched::within(256, || {
        if let Err(error) = tokenizer::check_invariants(&data[..cut], &String::from_utf8_lossy(text)) {
            watched::told(&error);
        }
    });
});
