//! What the first bytes of a picture's file say: its kind and its size. Nothing is decoded.
//!
//! Files come from strangers: every byte is asked for, none is assumed, and a size that no decoder should be given is an
//! error.

/// Kinds of files that are read, by their media types.
pub const MEDIA_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/// Pixels of the largest picture: what Pillow refuses to decode.
const MOST_PIXELS: u64 = 178_956_970;

/// Pixels of the longest side: what JPEG, GIF and WebP can say.
const LONGEST: u32 = 65_535;

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Index into [`MEDIA_TYPES`].
    pub kind: u8,
    /// Pixels from left to right.
    pub width: u32,
    /// Pixels from top to bottom.
    pub height: u32,
}

/// Reads the header of a file.
///
/// # Errors
/// Why it is not a picture that can be used, in words that go on after "a picture".
pub fn read(file: &[u8]) -> Result<Header, String> {
    let (kind, size) = match file {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => (0, png(file)),
        [0xff, 0xd8, 0xff, ..] => (1, jpeg(file)),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => (2, webp(file)),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => (3, gif(file)),
        _ => return Err(format!("whose file is {}, and PNG, JPEG, WebP and GIF are read", other(file))),
    };
    let cut = || format!("whose file is cut before its size is said ({} bytes)", file.len());
    let (width, height) = size.ok_or_else(cut)?;
    if width == 0 || height == 0 {
        return Err(format!("of {width} x {height} pixels"));
    }
    if width > LONGEST || height > LONGEST || u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(format!("of {width} x {height} pixels, which is more than any decoder takes"));
    }
    Ok(Header { kind, width, height })
}

fn png(file: &[u8]) -> Option<(u32, u32)> {
    (file.get(12..16)? == b"IHDR").then_some(())?;
    Some((big(file, 16)?, big(file, 20)?))
}

fn gif(file: &[u8]) -> Option<(u32, u32)> {
    Some((little16(file, 6)?, little16(file, 8)?))
}

/// The size in the frame header, behind segments that say how long they are.
fn jpeg(file: &[u8]) -> Option<(u32, u32)> {
    let mut at = 2;
    loop {
        (*file.get(at)? == 0xff).then_some(())?;
        let marker = *file.get(at + 1)?;
        match marker {
            // Fill bytes before a marker, and markers without a length.
            0xff => at += 1,
            0x01 | 0xd0..=0xd7 => at += 2,
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                return Some((big16(file, at + 7)?, big16(file, at + 5)?));
            }
            // The data begins, or the file ends, before a size was said.
            0xd8..=0xda => return None,
            _ => at += 2 + big16(file, at + 2).filter(|&length| length >= 2)? as usize,
        }
    }
}

fn webp(file: &[u8]) -> Option<(u32, u32)> {
    match file.get(12..16)? {
        b"VP8X" => Some((1 + little24(file, 24)?, 1 + little24(file, 27)?)),
        b"VP8L" => {
            (*file.get(20)? == 0x2f).then_some(())?;
            let bits = u32::from_le_bytes(file.get(21..25)?.try_into().ok()?);
            Some((1 + (bits & 0x3fff), 1 + (bits >> 14 & 0x3fff)))
        }
        b"VP8 " => {
            (file.get(23..26)? == [0x9d, 0x01, 0x2a]).then_some(())?;
            Some((little16(file, 26)? & 0x3fff, little16(file, 28)? & 0x3fff))
        }
        _ => None,
    }
}

/// What another file seems to be.
fn other(file: &[u8]) -> &'static str {
    let text = String::from_utf8_lossy(&file[..file.len().min(512)]).to_ascii_lowercase();
    match file {
        [] => "empty",
        [b'%', b'P', b'D', b'F', ..] => "a PDF",
        [b'B', b'M', ..] => "a BMP",
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "a TIFF",
        [_, _, _, _, b'f', b't', b'y', b'p', b'a', b'v', b'i', ..] => "an AVIF",
        [_, _, _, _, b'f', b't', b'y', b'p', b'h' | b'm', ..] => "a HEIC",
        _ if text.trim_start().starts_with("<svg") || text.contains("<svg") => "an SVG",
        _ => "of no kind that is known",
    }
}

fn big(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(file.get(at..at + 4)?.try_into().ok()?))
}

fn big16(file: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_be_bytes(file.get(at..at + 2)?.try_into().ok()?).into())
}

fn little16(file: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_le_bytes(file.get(at..at + 2)?.try_into().ok()?).into())
}

fn little24(file: &[u8], at: usize) -> Option<u32> {
    let bytes = file.get(at..at + 3)?;
    Some(u32::from(bytes[0]) | u32::from(bytes[1]) << 8 | u32::from(bytes[2]) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x05\0\0\0\x07";
    const JPEG: &[u8] = b"\xff\xd8\xff\xe0\0\x04ab\xff\xff\xc2\0\x0b\x08\0\x07\0\x05";
    const GIF: &[u8] = b"GIF89a\x05\0\x07\0";
    const LOSSY: &[u8] = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0abc\x9d\x01\x2a\x05\0\x07\0";
    const LOSSLESS: &[u8] = b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f\x04\x80\x01\0";
    const EXTENDED: &[u8] = b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0\x04\0\0\x06\0\0";

    #[test]
    fn each_kind_says_its_size() {
        let files = [(0, PNG), (1, JPEG), (2, LOSSY), (2, LOSSLESS), (2, EXTENDED), (3, GIF)];
        for (kind, file) in files {
            assert_eq!(read(file), Ok(Header { kind, width: 5, height: 7 }), "{file:?}");
            for end in 8..file.len() {
                assert!(read(&file[..end]).is_err(), "{file:?} cut at {end}");
            }
        }
    }

    #[test]
    fn what_no_decoder_takes_is_refused_by_its_header() {
        let sized = |width: u32, height: u32| [&PNG[..16], &width.to_be_bytes(), &height.to_be_bytes()].concat();
        assert!(read(&sized(13_377, 13_377)).is_ok());
        for (width, height) in [(0, 5), (5, 0), (20_000, 20_000), (65_536, 1), (u32::MAX, u32::MAX)] {
            assert!(read(&sized(width, height)).unwrap_err().contains("pixels"), "{width} x {height}");
        }
        let named = [
            (&b"%PDF-1.7"[..], "PDF"),
            (b"<?xml version='1.0'?><SVG xmlns=", "SVG"),
            (b"\0\0\0\x18ftypheic", "HEIC"),
            (b"\0\0\0\x18ftypavif", "AVIF"),
            (b"BM\0\0", "BMP"),
            (b"", "empty"),
            (b"hello", "no kind"),
        ];
        for (file, name) in named {
            assert!(read(file).unwrap_err().contains(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(start in prop::sample::select(vec![PNG, JPEG, GIF, LOSSY, LOSSLESS, EXTENDED]),
            keep in 0_usize..40, rest in prop::collection::vec(any::<u8>(), 0..64)) {
            let file = [&start[..keep.min(start.len())], &rest].concat();
            let _ = read(&file);
        }
    }
}
