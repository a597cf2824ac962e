//! Properties that are valid for any bytes and for any sizes of the reads.

use super::*;

/// A stream that returns at most a few bytes per read.
struct Trickle(io::Cursor<Vec<u8>>, usize);

impl Read for Trickle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(self.1);
        self.0.read(&mut buffer[..count])
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_result_does_not_depend_on_chunks_or_on_how_bytes_arrive(
        kinds in prop::collection::vec(0_u8..6, 1..40),
        chunk_bytes in 1_usize..3000,
        step in 1_usize..97,
        array in any::<bool>(),
    ) {
        let records: Vec<String> = kinds.iter().enumerate().map(|(index, kind)| match kind {
            0 => "{\"messages\": 5}".to_owned(),
            1 => format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"]}}\\\"{index}\"}}]}}"),
            2 if !array => format!(
                "data: {{\"choices\":[{{\"delta\":{{\"content\":\"{index}\"}}}}]}}\n\ndata: [DONE]\n"
            ),
            _ => line(&index.to_string()),
        }).collect();
        let text = if array { format!("[{}]", records.join(" ,\n")) } else { records.join("\n") };
        let bytes = text.into_bytes();
        let read = |options: Options, step: usize| {
            let stream = Trickle(io::Cursor::new(bytes.clone()), step);
            let mut reader = Reader::from_reader(stream, "f", options).expect("opens");
            let traces: Vec<_> = reader.by_ref().map(|trace| trace.expect("bad ones are skipped")).collect();
            let found: Vec<_> = traces.iter().map(|t| (t.id.clone(), t.location.line, t.record().expect("it is held").into_owned())).collect();
            (found, reader.report().bad)
        };
        let skip = Options { on_error: OnError::Skip, ..Options::default() };
        let whole = read(skip.clone(), usize::MAX);
        prop_assert_eq!(whole.0.len() as u64 + whole.1, kinds.len() as u64);
        prop_assert_eq!(read(Options { chunk_bytes, ..skip }, step), whole);
    }

    #[test]
    fn what_is_too_long_is_cut_alike_however_its_bytes_arrive(
        kinds in prop::collection::vec(0_u8..7, 1..12),
        limit in 120_usize..200,
        step in 1_usize..300,
        blanks in 0_usize..300,
        array in any::<bool>(),
    ) {
        let data = |text: &str| format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}");
        let records: Vec<String> = kinds.iter().enumerate().map(|(index, kind)| match kind {
            0 => format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"{}\"}}]}}", "]}\\\"{,".repeat(60)),
            1 => format!("\"{}\"", "data: {,] ".repeat(40)),
            2 => "1".repeat(400),
            3 if !array => format!("{}\n\n{}\n\ndata: [DONE]", data("a"), data(&"b".repeat(300))),
            4 if !array => format!("{}data: [DONE]", format!("{}\n\n", data("ab")).repeat(9)),
            _ => line(&index.to_string()),
        }).collect();
        let text = if array { format!("[{}]", records.join(" ,\n")) } else { records.join("\n") };
        let bytes = format!("{}{text}", " ".repeat(blanks)).into_bytes();
        let folder = tempfile::tempdir().expect("a folder");
        let read = |name: &str, step: usize| {
            let prefix = folder.path().join(name);
            let options = Options {
                on_error: OnError::Quarantine(prefix.clone()), max_record_bytes: limit, ..Options::default()
            };
            let stream = Trickle(io::Cursor::new(bytes.clone()), step);
            let mut reader = Reader::from_reader(stream, "f", options).expect("opens");
            let found: Vec<_> = reader.by_ref().map(|t| t.map(|t| (t.id, t.location.line)).map_err(|e| e.to_string())).collect();
            let aside = |suffix: &str| fs::read(format!("{}.quarantine.{suffix}", prefix.display())).unwrap_or_default();
            // The number of blanks of a line that are buffered depends on the sizes of the reads.
            let raw: Vec<u8> = if blanks > limit { Vec::new() } else { aside("raw") };
            (found, reader.report().bad, reader.report().reasons.clone(), raw)
        };
        let whole = read("whole", usize::MAX);
        prop_assert_eq!(read("parts", step), whole);
    }

    #[test]
    fn a_broken_file_is_read_as_far_as_it_goes_and_never_a_panic(
        kinds in prop::collection::vec(0_u8..6, 1..6),
        layout in 0_u8..3,
        container in 0_u8..4,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        limit in prop::sample::select(vec![1_usize, 60, 1 << 20]),
    ) {
        let records: Vec<String> = kinds.iter().enumerate().map(|(index, kind)| match kind {
            0 => "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]".to_owned(),
            1 => format!("{{\"prompt_ids\": [1], \"completion_ids\": [{index}], \"logprobs\": [-0.5]}}"),
            2 => format!("{{\n \"messages\": [{{\"role\": \"user\", \"content\": \"{index}\"}}]\n}}"),
            _ => line(&index.to_string()),
        }).collect();
        let text = match layout {
            0 => records.join("\n"),
            1 => format!("[{}]", records.join(",\n")),
            _ => format!("\u{feff}\n \n{}\r\n", records.join("\r\n")),
        };
        let mut bytes = match container {
            0 => text.into_bytes(),
            1 => gzip(text.as_bytes()),
            2 => zstd_frame(text.as_bytes()),
            _ => [gzip(text.as_bytes()), gzip(text.as_bytes())].concat(),
        };
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        let options = Options { on_error: OnError::Skip, max_record_bytes: limit, ..Options::default() };
        match read_all(&bytes, "f", options) {
            Ok((traces, report)) => {
                prop_assert_eq!(report.traces, traces.len() as u64);
                prop_assert_eq!(report.records, report.traces + report.bad);
                for error in &report.first_errors {
                    prop_assert!(error.to_string().contains(": f:"), "{}", error);
                }
            }
            Err(error) => prop_assert!(error.to_string().contains(": f:"), "{}", error),
        }
    }
}
