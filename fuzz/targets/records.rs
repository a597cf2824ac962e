//! A file of records: whatever its bytes, reading ends with traces and located errors, and a bad record stops no other.
#![no_main]

mod watched;

use libfuzzer_sys::fuzz_target;
use std::io::Cursor;
use tracegrad_core::read::{OnError, Options, Reader};

fuzz_target!(|data: &[u8]| {
    watched::within(64, || {
        let skip = Options { on_error: OnError::Skip, max_record_bytes: 1 << 16, ..Options::default() };
        let raise = Options { on_error: OnError::Raise, ..skip.clone() };
        let Ok(reader) = Reader::from_reader(Cursor::new(data.to_vec()), "fuzzed", skip) else { return };
        let kept = reader.take_while(Result::is_ok).count();
        let mut before = 0;
        if let Ok(reader) = Reader::from_reader(Cursor::new(data.to_vec()), "fuzzed", raise) {
            for each in reader {
                match each {
                    Ok(_) => before += 1,
                    Err(error) => {
                        watched::told(&error);
                        break;
                    }
                }
            }
        }
        assert!(kept >= before, "what is read before an error is read where errors are skipped");
    });
});
