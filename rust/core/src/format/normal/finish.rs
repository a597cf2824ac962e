//! Finish reasons of all servers, mapped to OpenAI's names.
//!
//! `stop`, `length`, `tool_calls`, `content_filter` and `abort` are what alignment asks about; a server's own name for one
//! of them becomes it, any other stays as it is. The record keeps what was written.

/// The common name of a server's finish reason.
pub fn common(raw: &str) -> &str {
    match raw {
        "eos" | "eos_token" | "end_turn" | "stop_sequence" | "STOP" | "end_of_sequence" | "end_id" | "stop_words"
        | "END_ID" | "STOP_WORDS" | "completed" | "word" | "end_of_turn" => "stop",
        "max_tokens" | "MAX_TOKENS" | "max_output_tokens" | "LENGTH" | "limit" | "model_context_window_exceeded" => {
            "length"
        }
        "tool_use" | "tool_call" => "tool_calls",
        "SAFETY" | "RECITATION" | "BLOCKLIST" | "PROHIBITED_CONTENT" | "SPII" | "refusal" => "content_filter",
        "aborted" | "cancelled" | "CANCELLED" | "error" | "failed" | "timeout" | "TIMEOUT" => "abort",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::common;

    #[test]
    fn a_servers_name_becomes_the_common_one_and_an_unknown_one_stays() {
        let named = ["end_turn", "STOP", "eos_token", "MAX_TOKENS", "tool_use", "SAFETY", "cancelled", "stop", "other"];
        let common: Vec<_> = named.into_iter().map(common).collect();
        assert_eq!(
            common,
            ["stop", "stop", "stop", "length", "tool_calls", "content_filter", "abort", "stop", "other"]
        );
    }
}
