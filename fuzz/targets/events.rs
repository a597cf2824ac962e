//! A stream of server-sent events whose data is whatever the bytes are: one event a line.
#![no_main]

mod watched;

use libfuzzer_sys::fuzz_target;
use std::io::Cursor;
use tracegrad_core::read::{Options, Reader};

fuzz_target!(|data: &[u8]| {
    let mut stream = Vec::with_capacity(2 * data.len());
    for line in data.split(|&byte| byte == b'\n') {
        if !line.starts_with(b"data:") && !line.starts_with(b"event:") {
            stream.extend_from_slice(b"data: ");
        }
        stream.extend_from_slice(line);
        stream.extend_from_slice(b"\n\n");
    }
    stream.extend_from_slice(b"data: [DONE]\n\n");
    watched::within(64, || {
        let Ok(reader) = Reader::from_reader(Cursor::new(stream), "fuzzed", Options::default()) else { return };
        for each in reader {
            let Err(error) = each else { continue };
            watched::told(&error);
            break;
        }
    });
});
