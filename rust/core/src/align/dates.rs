//! Dates that a chat template prints: found in the recorded prompt, so that it can be rendered as on that day.

use jiff::civil::Date;
use jiff::fmt::strtime::BrokenDownTime;

/// The forms that templates print.
const FORMS: [&str; 5] = ["%d %b %Y", "%Y-%m-%d", "%d %B %Y", "%B %d, %Y", "%b %d, %Y"];

/// The first date in `text`, as `2025-03-07`.
pub fn find(text: &str) -> Option<String> {
    let starts = text.char_indices().filter(|(at, c)| {
        c.is_ascii_alphanumeric() && !text[..*at].chars().next_back().is_some_and(|c| c.is_ascii_alphanumeric())
    });
    for (at, _) in starts {
        for form in FORMS {
            let Ok((parts, _)) = BrokenDownTime::parse_prefix(form, &text.as_bytes()[at..]) else { continue };
            let Ok(date) = parts.to_date() else { continue };
            let date: Date = date;
            return Some(date.to_string());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_of_the_templates_are_found() {
        assert_eq!(find("Today Date: 26 Jul 2024\n\n").as_deref(), Some("2024-07-26"));
        assert_eq!(find("Current date: 2025-06-28\n").as_deref(), Some("2025-06-28"));
        assert_eq!(find("The date is July 4, 2025.").as_deref(), Some("2025-07-04"));
        assert_eq!(find("no date, 12 of them"), None);
    }
}
