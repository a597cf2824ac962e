use super::super::diagnose::parse_generic;
use super::super::object::{Kind, Node};
use super::cursor::Cursor;
use super::{is_json, object};
use crate::format::detect::is_sign;
use proptest::prelude::*;
use serde_json::json;

/// Checks that the generic parser returns the same as the scanner, if the scanner supports the text. Returns whether it
/// does.
fn same(text: &str) -> bool {
    let Some(scanned) = object(text, Kind::Record(is_sign)) else { return false };
    let Ok(Node::Object(object)) = parse_generic(text, Kind::Record(is_sign)) else { panic!("{text}") };
    assert_eq!(format!("{scanned:?}"), format!("{object:?}"), "{text}");
    true
}

const CALL: &str = r#"{"id": "a", "reward": 1.0, "calls": [{"request": {"model": "m", "messages": [{"role": "user",
    "content": "2+2? \u00e9 \ud83d\ude0a \"x\" \\ \/ \n"}], "temperature": 0.7, "tools": [{"a": [1, -2, 3.5, 1e3, true, null]}]},
    "response": {"prompt_token_ids": [1, 2147483647, 0], "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"},
    "logprobs": {"content": [{"token": "4", "logprob": -0.9253435134887695, "bytes": [52], "top_logprobs": [{"token": "4",
    "logprob": -0.9253435134887695, "bytes": [52]}]}, {"token": "\ud83d\ude0a", "logprob": -0.0, "bytes": null, "token_id": 7},
    {"logprob": null, "token": null, "bytes": []}], "refusal": null}, "token_ids": [52, 151645, 3]}]}}]}"#;

const NAMED: &str = r#"{"id":"b","tools":[{"type":"function"}],"messages":[{"role":"user","content":"?"},{"message":{"role":"assistant",
    "content":"4\n"},"logprobs":{"content":[{"token":"token_id:19","logprob":-0.00062042527133,"bytes":[52],"top_logprobs":[{"token":
    "token_id:19","logprob":-0.00062042527133,"bytes":[52]}]},{"token":"token_id:19","logprob":-6.2042e-05,"bytes":[52],"top_logprobs":
    [{"token":"token_id:19","logprob":-6.2042e-05,"bytes":[52]}]},{"token":"token_id:0","logprob":-1,"bytes":[195,169],"top_logprobs":[
    {"token":"token_id:7","logprob":-0.5,"bytes":[10]},{"token":"token_id:0","logprob":-1,"bytes":[195,169]}]},{"token":"token_id:151645",
    "logprob":-0.0,"bytes":[],"top_logprobs":[]}]}}],"calls":null,"prompt_token_ids":[1,2,3]}"#;

#[test]
fn a_call_log_is_known_whole() {
    assert!(same(CALL));
    assert!(same(NAMED) && same(&NAMED.replace(['\n', ' '], "")));
    assert!(same(&CALL.replace(['\n', ' '], "")));
    let pretty: serde_json::Value = serde_json::from_str(CALL).unwrap();
    assert!(same(&serde_json::to_string_pretty(&pretty).unwrap()));
}

#[test]
fn every_prefix_and_every_changed_byte_gives_what_the_generic_parser_gives() {
    let compact = CALL.replace(['\n', ' '], "");
    for end in (0..compact.len()).filter(|&end| compact.is_char_boundary(end)) {
        assert!(!same(&compact[..end]));
    }
    for at in 0..compact.len() {
        for new in *b"\"\\{}[],:0-.eEnu \x00\x1f\n9a" {
            let mut bytes = compact.clone().into_bytes();
            bytes[at] = new;
            if let Ok(text) = String::from_utf8(bytes) {
                same(&text);
            }
        }
    }
}

#[test]
fn a_number_beside_the_middle_of_two_float32_is_rounded_as_by_way_of_float64() {
    // The nearest float64 of each is exactly the midpoint of two float32 and rounds to the even one. Dividing the
    // digits by a power of ten, each rounded, gives the float64 next to it. That one rounds to the other float32:
    // 15.219193935394285 for the first.
    for text in ["15.21919393539428710", "2.000905632972717485", "5.169158697128295798", "0.2486225143074989321"] {
        let exact: f64 = text.parse().unwrap();
        let divisor = 10_f64.powi(text.len() as i32 - 1 - text.find('.').unwrap() as i32);
        let quick = text.replace('.', "").trim_start_matches('0').parse::<u64>().unwrap() as f64 / divisor;
        assert_eq!(exact.to_bits() & ((1 << 29) - 1), 1 << 28, "{text} is no longer a middle");
        assert_ne!(quick as f32, exact as f32, "{text} no longer tells the two apart");
        let behind = format!("{text}, {{\"token\": \"Hi\"}}");
        let common = Cursor::new(&behind).short_decimal().unwrap_or(exact);
        let found = Cursor::new(&behind).float32_value().unwrap();
        assert_eq!([found as f32, common as f32], [exact as f32; 2], "{text}");
    }
}

#[test]
fn what_it_does_not_know_it_leaves_to_the_generic_parser() {
    for text in [
        "",
        "[]",
        "5",
        "{} {}",
        "{\"a\": 01}",
        "{\"a\": 1.}",
        "{\"a\": .5}",
        "{\"a\": -}",
        "{\"a\": 1e}",
        "{\"a\": \"\\ud83d\"}",
        "{\"a\": \"\\ude0a\\ud83d\"}",
        "{\"a\": \"\\x\"}",
        "{\"a\": \"\t\"}",
        "{\"a\": tru}",
        "{\"a\": 1,}",
        "{\"messages\": [{\"role\": \"assistant\", \"token_ids\": [-1]}]}",
        "{\"messages\": [{\"role\": \"assistant\", \"token_ids\": [1.0]}]}",
        "{\"messages\": [{\"role\": \"assistant\", \"logprobs\": {\"content\": [{\"bytes\": [256]}]}}]}",
    ] {
        assert!(!same(text), "{text}");
    }
    let deep = format!("{{\"metadata\": {}{}}}", "[".repeat(200), "]".repeat(200));
    assert!(!same(&deep));
}

#[test]
fn bare_words_for_numbers_are_the_words_in_quotes_and_no_json() {
    for word in ["NaN", "Infinity", "-Infinity"] {
        let record = format!(
            r#"{{"reward":{word},"a":[{word},{{"b": {word} }}],"messages":[{{"role":"assistant","x":{word},"logprobs":
            {{"content":[{{"token":"a","logprob":{word},"top_logprobs":[{{"logprob":{word}}}]}},{{"token":"a","logprob":-1}}]}}}}]}}"#
        );
        assert!(same(&record), "{record}");
        assert!(!is_json(&record) && is_json(&record.replace(word, "0")), "{record}");
        for broken in ["NaNx", "nan", "Infinit", "--Infinity", "- Infinity", "+Infinity", "NaN NaN", "1NaN"] {
            assert!(!same(&record.replacen(word, broken, 1)), "{broken}");
        }
        assert!(!same(&format!(r#"{{"messages":[{{"role":"assistant","token_ids":[{word}]}}]}}"#)));
        assert!(!same(&format!("{{{word}: 1}}")));
    }
}

#[test]
fn every_form_of_logprobs_is_known_and_what_is_refused_is_left() {
    let record = |logprobs: &serde_json::Value| {
        json!({"messages": [{"role": "assistant", "content": "x", "logprobs": logprobs,
            "generation": {"tokens": ["a", null], "bytes": [[1], null]}}]})
    };
    for logprobs in [
        json!({"tokens": ["a", "b"], "token_logprobs": [-0.5, null]}),
        json!({"tokens": ["a", null], "token_logprobs": [-0.5, -1], "text_offset": [0, 1], "top_logprobs": null}),
        json!({"tokens": null, "token_ids": [5, 6], "logprobs": [-0.5, -1]}),
        json!({"tokens": ["token_id:5"], "token_ids": null, "values": [-0.5]}),
        json!({"tokens": ["a"], "values": [{"token": "token_id:5", "logprob": -0.5, "bytes": [98]}]}),
        json!({"values": [{"token": "token_id:5", "logprob": -0.5}, {"token": "b", "logprob": -1}], "tokens": ["a", "b"]}),
        json!({"values": [{"token": "token_id:5", "logprob": -0.5}]}),
        json!({"values": [-0.5], "content": [{"token": "a", "logprob": -2}]}),
        json!({"values": [-0.5]}),
        json!({}),
        json!({"content": null, "refusal": [{"token": "I", "logprob": -0.01, "bytes": [73]}]}),
        json!([-0.5, -1]),
        json!([{"logprob": -0.5}]),
        json!(null),
    ] {
        assert!(same(&record(&logprobs).to_string()), "{logprobs}");
    }
    for logprobs in [
        json!({"top_logprobs": [], "text_offset": []}),
        json!({"tokens": [5], "values": [-0.5]}),
        json!({"tokens": ["a", 5]}),
        json!({"content": {}}),
        json!({"tokens": ["token_id:3000000000"]}),
        json!("x"),
    ] {
        assert!(!same(&record(&logprobs).to_string()), "{logprobs}");
    }
}

#[test]
fn entries_that_are_not_written_like_the_one_before_are_read_all_the_same() {
    let entries = [
        r#"{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}"#,
        r#"{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":null}]}"#,
        r#"{"token": "b", "logprob": -1, "bytes": [98]}"#,
        r#"{"logprob":-0.25,"token":"\u00e9\n","bytes":[195, 169,10],"token_id":7}"#,
        r#"{"token":null,"logprob":null,"bytes":null,"token_id":null}"#,
        r#"{"token":"a","token":"b","logprob":-1.5,"bytes":[0,9,10,99,100,255]}"#,
        r#"{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6,"g":7,"h":8,"i":9,"token":"x","logprob":-2}"#,
        r#"{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[],"more":{"x":[]}}"#,
        "-0.125",
        "{}",
        r#"{"token":"token_id:5","logprob":-5e-07,"bytes":[97],"top_logprobs":[{"token":"token_id:5","logprob":-5e-07,"bytes":[97]}]}"#,
        r#"{"token":"token_id:5","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"token_id:6","logprob":0,"bytes":null},{"token":"\n","logprob":-0.5,"bytes":[97]}]}"#,
        r#"{"token":"token_id:5","logprob":-0.5,"bytes":[116,111,107,101,110,95,105,100,58,53],"token_id":5}"#,
        r#"{"token":"token_id:123456789","logprob":-0.5,"bytes":[97]}"#,
        r#"{"token":"token_id:05","logprob":-0.5,"bytes":[97]}"#,
        r#"{"token":"x","token":"token_id:0","logprob":-0.5,"bytes":[1],"bytes":[97,98]}"#,
        r#"{"token":"token_id:0","token":"y","logprob":-0.5,"bytes":[97,98],"bytes":null}"#,
        r#"{"token":"token_id:7","token":null,"logprob":-0.5}"#,
    ];
    for (first, second) in entries.iter().flat_map(|first| entries.iter().map(move |second| (first, second))) {
        let record = format!(
            r#"{{"messages":[{{"role":"assistant","logprobs":{{"content":[{first},{first} ,{second},{first}]}}}}]}}"#
        );
        assert!(same(&record), "{record}");
    }
    for byte in ["256", "01", "-1", "1.0", "1e1", "0256", "1000", ""] {
        let bad = entries[0].replace("[97]", &format!("[97,{byte}]"));
        let record = format!(r#"{{"messages":[{{"role":"assistant","logprobs":[{},{bad}]}}]}}"#, entries[0]);
        assert!(!same(&record), "{record}");
    }
}

#[test]
fn strings_of_every_length_around_every_escape_are_the_same() {
    for length in 0..40 {
        for escape in [r"\n", r#"\""#, r"\\", r"\/", r"\b\f\r\t", r"\u00e9", r"\ud83d\ude0a", "\u{e9}", "\u{1f60a}"] {
            let text = format!(r#"{{"id":"{}{escape}{}"}}"#, "x".repeat(length), "y".repeat(length % 11));
            assert!(same(&text), "{text}");
        }
        for broken in
            [r"\", r"\x", r"\u12", r"\u12g4", r"\ud83d", r"\ud83dx", r"\ud83d\u0041", r"\ude0a", "\u{1}", "\n"]
        {
            let text = format!(r#"{{"id":"{}\n{broken}"}}"#, "x".repeat(length));
            assert!(!same(&text), "{text}");
        }
    }
}

#[test]
fn tools_that_were_read_before_are_those_that_stand_here() {
    let lists = [
        r#"[{"a":1}]"#,
        r#"[{"a":1} ]"#,
        r#"[{"a":1}, {"b":[]}]"#,
        "[]",
        r#"[{"a":1.0}]"#,
        "null",
        r#""[]""#,
        "[[[]]]",
    ];
    for (first, second) in lists.iter().flat_map(|first| lists.iter().map(move |second| (first, second))) {
        let record = |tools: &str| format!(r#"{{"tools": {tools},"calls":[{{"request":{{"tools":{second} }}}}]}}"#);
        assert!(same(&record(first)) && same(&record(first)));
        assert!(!same(&record(&format!("{first}]"))) && !same(&record(&first[..first.len() - 1])));
    }
}

#[test]
fn prompts_that_begin_like_the_one_before_are_the_ids_that_stand_there() {
    let lists = [
        "[]", "[1]", "[12]", "[1,2]", "[ 1,2]", "[1, 2]", "[1,2 ]", "[1,2 ,3]", "[1,2,3]", "[1,23]", "[ ]", "[1,2,03]",
        "[1,2,]",
    ];
    for (first, second) in lists.iter().flat_map(|first| lists.iter().map(move |second| (first, second))) {
        let record = format!(
            r#"{{"calls":[{{"response":{{"prompt_token_ids":{first}}}}},{{"response":{{"prompt_token_ids":{second}}}}}]}}"#
        );
        let valid = [first, second].iter().all(|list| serde_json::from_str::<Vec<u32>>(list).is_ok());
        assert_eq!(same(&record), valid, "{record}");
    }
}

/// A logprob's text with any number of digits.
fn logprob() -> impl Strategy<Value = String> {
    prop_oneof![
        (0u64..100, "[0-9]{1,19}").prop_map(|(whole, digits)| format!("-{whole}.{digits}")),
        any::<f32>().prop_map(|value| format!("{}", -value.abs())),
        // As Python writes small ones.
        ("[1-9]\\.[0-9]{0,18}[1-9]", 0u32..30).prop_map(|(digits, exponent)| format!("-{digits}e-{exponent:02}")),
        any::<f64>().prop_filter("JSON has no NaN", |value| value.is_finite()).prop_map(|value| format!("{value:e}")),
        any::<f32>().prop_filter("JSON has no NaN", |value| value.is_finite()).prop_map(|value| format!("{value}")),
        // Halfway between two float32, and next to it.
        (any::<u32>(), -3i64..=3).prop_map(|(bits, step)| {
            let short = f32::from_bits(bits & 0x7FFF_FFFF | 0x8000_0000);
            let next = f32::from_bits(short.to_bits().wrapping_add(1));
            let middle = f64::midpoint(f64::from(short), f64::from(next));
            let value = f64::from_bits(middle.to_bits().wrapping_add_signed(step));
            if value.is_finite() { format!("{value}") } else { "0".to_owned() }
        }),
        Just("-9999.0".to_owned()),
        Just("-9999.00000000000001".to_owned()),
        Just("0".to_owned()),
        Just("-0.0".to_owned()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn numbers_have_the_same_bits(logprobs in prop::collection::vec(logprob(), 1..20), other in logprob()) {
        let entries: Vec<_> = logprobs.iter().map(|value| format!(r#"{{"logprob":{value}}}"#)).collect();
        let text = format!(r#"{{"messages":[{{"role":"assistant","logprobs":[{}]}}],"reward":{other}}}"#, entries.join(","));
        same(&text);
    }

    #[test]
    fn any_text_survives(content in any::<String>(), token in any::<String>(), ids in prop::collection::vec(any::<u32>(), 0..5)) {
        let record = json!({"id": content, "messages": [{"role": "user", "content": content}, {"role": "assistant",
            "content": token, "token_ids": ids, "logprobs": {"content": [{"token": token, "logprob": -1, "bytes": token.as_bytes()}]}}]});
        same(&record.to_string());
        // Python's json writes everything beyond ASCII as escapes.
        let ascii: String = record.to_string().chars().flat_map(|char| {
            let mut units = [0; 2];
            if char.is_ascii() { vec![char.to_string()] }
            else { char.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect() }
        }).collect();
        same(&ascii);
    }

    #[test]
    fn mutated_records_give_the_same_or_are_left(
        named in any::<bool>(),
        at in 0usize..1400,
        bytes in prop_oneof![prop::collection::vec(any::<u8>(), 0..4), "[0-9\"\\[\\]{},:. e-]{0,4}".prop_map(String::into_bytes)],
        cut in 0usize..4,
    ) {
        let mut record = if named { NAMED.replace(['\n', ' '], "") } else { CALL.to_owned() }.into_bytes();
        let at = at.min(record.len());
        let end = (at + cut).min(record.len());
        record.splice(at..end, bytes);
        if let Ok(text) = String::from_utf8(record) {
            same(&text);
        }
    }
}
