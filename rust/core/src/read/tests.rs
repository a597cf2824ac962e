mod laws;

use super::split::{Piece, Splitter};
use super::*;
use crate::error::{Kind, Result};
use crate::format::Reason;
use proptest::prelude::*;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

fn line(id: &str) -> String {
    format!(
        r#"{{"id": "{id}", "messages": [{{"role": "user", "content": "é"}}, {{"role": "assistant", "content": "4"}}]}}"#
    )
}

fn opened(bytes: &[u8], options: Options) -> Reader {
    Reader::from_reader(io::Cursor::new(bytes.to_vec()), "runs.jsonl", options).expect("the stream opens")
}

fn reader(bytes: &[u8], on_error: OnError) -> Reader {
    opened(bytes, Options { on_error, ..Options::default() })
}

fn ids(reader: &mut Reader) -> Vec<String> {
    reader.map(|trace| trace.expect("a good record").id).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("memory takes it")
}

fn zstd_frame(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).expect("memory takes it")
}

#[test]
fn every_container_and_layout_gives_the_same_traces() {
    let (one, two) = (line("a"), line("b"));
    let pretty = |text: &str| {
        let value: serde_json::Value = serde_json::from_str(text).expect("it is JSON");
        serde_json::to_string_pretty(&value).expect("it is a value")
    };
    let parts = |pack: fn(&[u8]) -> Vec<u8>| [pack(format!("{one}\n").as_bytes()), pack(two.as_bytes())].concat();
    let streams: Vec<Vec<u8>> = vec![
        format!("{one}\n{two}\n").into(),
        format!("{one}\n{two}").into(),
        format!("{one},\r\n{two} ,\n").into(),
        format!("\u{feff}\n\n{one}\r\n  \r\n{two}\r\n").into(),
        format!("[{one}, {two}]\n").into(),
        format!("[\n  {},\n {}\n]", pretty(&one), pretty(&two)).into(),
        format!("{}\n{}\n", pretty(&one), pretty(&two)).into(),
        gzip(format!("{one}\n{two}").as_bytes()),
        parts(gzip),
        parts(zstd_frame),
        [b"\x50\x2a\x4d\x18\x02\x00\x00\x00xy".to_vec(), parts(zstd_frame)].concat(),
    ];
    for (case, stream) in streams.iter().enumerate() {
        assert_eq!(ids(&mut reader(stream, OnError::Raise)), ["a", "b"], "case {case}");
    }
}

#[test]
fn lines_are_counted_through_blanks_and_arrays() {
    let second_line = |stream: String| {
        let error = reader(stream.as_bytes(), OnError::Raise).find_map(Result::err).expect("a bad record");
        error.location.line
    };
    let good = line("a");
    assert_eq!(second_line(format!("\n{good}\n\nhello\n")), Some(4));
    assert_eq!(second_line(format!("[{good},\n\n 5]")), Some(3));
}

#[test]
fn an_empty_stream_is_an_error_under_every_policy() {
    let empty = gzip(b"");
    let cases = [
        (&b""[..], "it is empty."),
        (b" \n\n", "there is no record"),
        (b"[]", "there is no record"),
        (&empty, "it is empty."),
    ];
    for (bytes, what) in cases {
        let error = reader(bytes, OnError::Skip).next().expect("an answer").expect_err("an error");
        assert!(error.to_string().contains(&format!(": runs.jsonl: {what}")), "{error}");
    }
}

#[test]
fn a_bad_record_ends_skips_or_goes_aside() {
    let stream = [line("a").as_bytes(), b"\n{\"messages\": \xff}\n", line("b").as_bytes(), b"\nhello"].concat();
    let mut raising = reader(&stream, OnError::Raise);
    assert_eq!(raising.next().expect("one").expect("good").id, "a");
    assert_eq!(raising.next().expect("two").expect_err("bad").location.line, Some(2));
    assert!(raising.next().is_none());

    let mut skipping = reader(&stream, OnError::Skip);
    assert_eq!(ids(&mut skipping), ["a", "b"]);
    let report = skipping.report();
    assert_eq!((report.records, report.traces, report.bad), (4, 2, 2));
    assert_eq!(report.reasons[&Reason::NotUtf8], 1);

    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("runs.jsonl");
    assert_eq!(ids(&mut reader(&stream, OnError::Quarantine(prefix))), ["a", "b"]);
    let raw = fs::read(folder.path().join("runs.jsonl.quarantine.raw")).expect("the bytes");
    assert_eq!(raw, b"{\"messages\": \xff}\nhello\n");
    let list = fs::read_to_string(folder.path().join("runs.jsonl.quarantine.jsonl")).expect("the list");
    let entries: Vec<serde_json::Value> = list.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((&entries[0]["line"], &entries[0]["reason"]), (&2.into(), &"not_utf8".into()));
    for (entry, bytes) in entries.iter().zip([&b"{\"messages\": \xff}"[..], b"hello"]) {
        let (offset, length) = (entry["offset"].as_u64().unwrap() as usize, entry["length"].as_u64().unwrap() as usize);
        assert_eq!(&raw[offset..offset + length], bytes);
    }
}

#[test]
fn a_truncated_stream_gives_what_came_before_and_says_where_it_broke() {
    let mut text = String::new();
    for index in 0..2000 {
        let _ = writeln!(text, "{}", line(&format!("t{index}-{}", index * 7919 % 1_000_003)));
    }
    for whole in [gzip(text.as_bytes()), zstd_frame(text.as_bytes())] {
        let cut = &whole[..whole.len() - 9];
        let mut reader = reader(cut, OnError::Skip);
        let read = ids(&mut reader).len();
        assert_eq!(reader.report().reasons[&Reason::Stream], 1);
        let error = &reader.report().first_errors[0];
        assert_eq!((error.kind, error.location.line), (Kind::Io, Some(read as u64 + 1)), "{error}");
        let raised = self::reader(cut, OnError::Raise).find_map(Result::err).expect("an error");
        assert!(raised.to_string().contains("the stream broke"), "{raised}");
    }
    // An array without its closing bracket: both complete elements are returned, then the error.
    let mut open = reader(format!("[{}, {}, ", line("a"), line("b")).as_bytes(), OnError::Skip);
    assert_eq!(ids(&mut open), ["a", "b"]);
    assert_eq!(open.report().reasons[&Reason::Stream], 1);
}

#[test]
fn a_record_beyond_the_limit_goes_aside_whole_and_is_never_held_whole() {
    let long = "x".repeat(3_000_000);
    let stream = format!("{}\n{long}\n{}\n", line("a"), line("b"));
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options {
        on_error: OnError::Quarantine(folder.path().join("q")),
        max_record_bytes: 1_000_000,
        ..Options::default()
    };
    let mut reader = opened(stream.as_bytes(), options);
    assert_eq!(ids(&mut reader), ["a", "b"]);
    assert_eq!((reader.report().bad, reader.report().reasons[&Reason::TooLong]), (1, 1));
    let raw = fs::read_to_string(folder.path().join("q.quarantine.raw")).expect("the bytes");
    assert_eq!(raw, format!("{long}\n"));
}

#[test]
fn a_line_of_fifty_megabytes_is_read() {
    let content = "é".repeat(25_000_000);
    let record = format!(r#"{{"messages": [{{"role": "user", "content": "{content}"}}]}}"#);
    let trace = reader(record.as_bytes(), OnError::Raise).next().expect("one").expect("good");
    assert_eq!(trace.messages[0].value["content"].as_str().map(str::len), Some(50_000_000));
}

#[test]
fn a_limit_stops_before_later_bad_records() {
    let stream = format!("{}\n{}\nhello\n", line("a"), line("b"));
    let mut reader = opened(stream.as_bytes(), Options { limit: Some(2), ..Options::default() });
    assert_eq!(ids(&mut reader), ["a", "b"]);
    assert_eq!(reader.report().bad, 0);
}

#[test]
fn what_is_no_file_is_named_and_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let devices = ["/dev/zero", "/dev/null"].map(Path::new).into_iter().filter(|device| device.exists());
    let devices = devices.map(|device| (device.to_owned(), ": it is a device."));
    let others = [(folder.path().join("none.jsonl"), "Check the path"), (folder.path().to_owned(), "directory")];
    for (path, what) in devices.chain(others) {
        let error = Reader::open(&path, Options::default()).err().expect("an error").to_string();
        assert!(error.contains(what) && error.contains(&format!(": {}", path.display())), "{error}");
    }
}

#[test]
fn what_is_written_is_what_was_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = format!("{{\n \"zz\": [1.50],\n \"messages\": [{{\"role\": \"user\"}}]\n}}\n{}\n", line("b"));
    let traces: Vec<_> = reader(text.as_bytes(), OnError::Raise).map(|trace| trace.expect("good")).collect();
    for name in ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"] {
        let path = folder.path().join(name);
        let mut writer = Writer::create(&path).expect("it opens");
        traces.iter().try_for_each(|trace| writer.write(trace)).and_then(|()| writer.finish()).expect("it is written");
        let again = Reader::open(&path, Options::default()).expect("opens");
        let again: Vec<_> = again.map(|trace| trace.expect("good")).collect();
        let first = again[0].record().expect("it is held");
        assert_eq!(&*first, br#"{  "zz": [1.50],  "messages": [{"role": "user"}] }"#);
        assert_eq!(again[1].record(), traces[1].record());
    }
    drop(Writer::create(&folder.path().join("dropped.jsonl")).expect("it opens"));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 3);
}

#[test]
fn streams_of_events_among_lines_are_records_of_their_own() {
    let chunk = |text: &str, end: &str| {
        format!(r#"data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{end}}}]}}"#)
    };
    let stream = format!("{}\r\n\r\n: still here\r\n{}\r\n\r\n", chunk("a", "null"), chunk("b", "\"stop\""));
    let text = format!("{stream}data: [DONE]\r\n\r\n{}\n{stream}{}\n{stream}", line("x"), line("y"));
    let found: Vec<_> = reader(text.as_bytes(), OnError::Raise).map(|trace| trace.expect("good")).collect();
    let lines: Vec<_> = found.iter().map(|trace| trace.location.line.expect("a line")).collect();
    assert_eq!(lines, [1, 8, 9, 14, 15]);
    for at in [0, 2, 4] {
        assert_eq!(found[at].messages[0].value["content"], "ab");
    }
    let kept: serde_json::Value = serde_json::from_slice(&found[0].record().expect("it is held")).expect("JSON");
    assert_eq!(kept["response"].as_str().expect("text").trim_end(), format!("{stream}data: [DONE]").trim_end());
    let again =
        decode_all(vec![found[0].record().expect("it is held").into()], "again", 1.into(), None).expect("reads");
    assert_eq!(again.0[0].messages, found[0].messages);
}

/// A stream of many blanks, followed by other bytes.
struct Blanks {
    left: u64,
    blank: u8,
    behind: io::Cursor<Vec<u8>>,
}

impl Read for Blanks {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if count == 0 {
            return self.behind.read(buffer);
        }
        self.left -= count as u64;
        buffer[..count].fill(self.blank);
        Ok(count)
    }
}

#[test]
fn blanks_before_the_first_record_are_let_go_of_and_a_long_line_of_them_is_a_bad_record() {
    let read = |blank: u8, limit: usize| {
        let behind = io::Cursor::new(format!("\n{}\n{}\n", line("a"), line("b")).into_bytes());
        let stream = Blanks { left: 32 << 20, blank, behind };
        let mut splitter = Splitter::new(Box::new(stream), None, limit);
        let (mut found, mut most) = (Vec::new(), 0);
        while let Some(piece) = splitter.next_piece() {
            most = most.max(splitter.held());
            found.push(match piece {
                Piece::Record { at, .. } => (at.line, false),
                Piece::Overlong { at, continued, .. } if !continued => (at.line, true),
                _ => continue,
            });
        }
        assert!(most < 1 << 20, "{most} bytes were held");
        found
    };
    let breaks = (32 << 20) + 2;
    assert_eq!(read(b'\n', 1 << 20), [(breaks, false), (breaks + 1, false)]);
    assert_eq!(read(b' ', 1 << 30), [(2, false), (3, false)]);
    assert_eq!(read(b' ', 1 << 20), [(1, true), (2, false), (3, false)]);
}

#[test]
fn a_window_of_zstd_is_part_of_what_is_held() {
    let text = format!("{}\n{}", line("a"), line("b"));
    let packed = |log: u32| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("memory takes it");
        encoder.window_log(log).expect("a window");
        encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish()).expect("memory takes it")
    };
    let read = |bytes: Vec<u8>, limit: usize| {
        let options = Options { max_record_bytes: limit, ..Options::default() };
        let reader = Reader::from_reader(io::Cursor::new(bytes), "f", options);
        reader.and_then(|reader| reader.map(|trace| trace.map(|trace| trace.id)).collect::<Result<Vec<_>>>())
    };
    for log in 10..=25 {
        assert_eq!(read(packed(log), 1000).expect("a common window"), ["a", "b"], "{log}");
    }
    let mib = 1 << 20;
    // 128 MiB, of which 32 MiB are always allowed: the other 96 MiB and the record fit a limit of 97 MiB.
    assert_eq!(read(packed(27), 97 * mib).expect("a window within the limit"), ["a", "b"]);
    for (log, limit) in [(27, 95 * mib), (30, 900 * mib)] {
        let error = read(packed(log), limit).expect_err("a window beyond the limit").to_string();
        assert!(error.contains(&format!(": f: zstd needs a window of 2^{log} bytes")), "{error}");
    }
    let second = read([packed(20), packed(27)].concat(), 1 << 30).expect_err("a larger window").to_string();
    assert!(second.contains("decompress it first"), "{second}");
    // A frame with a single segment contains the size of its content instead: 5,000,000,000 bytes.
    let mut segment = vec![0x28, 0xb5, 0x2f, 0xfd, 0b1110_0000];
    segment.extend(5_000_000_000_u64.to_le_bytes());
    segment.extend([1, 0, 0]);
    let error = read(segment, 1 << 30).expect_err("a window beyond the limit").to_string();
    assert!(error.contains("2^33"), "{error}");
}
