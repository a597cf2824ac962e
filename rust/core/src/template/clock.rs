//! `strftime_now`: the local time a template may print, or a pinned one.
//!
//! A render asks for the time once, so that its passes agree. Called by the template environment.

use jiff::Zoned;
use jiff::civil::DateTime;
use jiff::fmt::strtime;

/// The moment a render happens at.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    Local(Box<Zoned>),
    Pinned(DateTime),
}

impl Clock {
    /// Local time.
    pub fn now() -> Self {
        Self::Local(Box::new(Zoned::now()))
    }

    /// A date or date and time in ISO form.
    pub fn pinned(text: &str) -> Option<Self> {
        text.parse().ok().map(Self::Pinned)
    }

    /// The moment in `format`, as `datetime.strftime` writes it.
    pub fn format(&self, format: &str) -> Result<String, String> {
        match self {
            Self::Local(zoned) => strtime::format(format, &**zoned),
            Self::Pinned(moment) => strtime::format(format, *moment),
        }
        .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_clock_prints_what_strftime_prints() {
        // python3 -c "import datetime as d; print(d.datetime(2025, 3, 7, 14, 5).strftime('%d %b %Y|%Y-%m-%d|%A, %B %d|%H:%M:%S|%-d %j'))"
        let clock = Clock::pinned("2025-03-07T14:05:00").unwrap();
        let got = clock.format("%d %b %Y|%Y-%m-%d|%A, %B %d|%H:%M:%S|%-d %j").unwrap();
        assert_eq!(got, "07 Mar 2025|2025-03-07|Friday, March 07|14:05:00|7 066");
        assert!(Clock::pinned("2025-03-07").is_some());
        assert!(Clock::pinned("yesterday").is_none());
    }
}
