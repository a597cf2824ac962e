//! Reads kind and size of an image from the first bytes of its file. Nothing is decoded.
//!
//! Files are untrusted. Every byte is bounds-checked, and a size that no decoder should receive is an error.
//!
//! `imagesize` is not used: it reads no orientation, rejects JPEG files with fill bytes before a marker, accepts PNG files
//! without IHDR, and counts the scale bits of lossy WebP as part of the size. Pillow does otherwise.

/// The supported kinds of files, by media type.
pub const MEDIA_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/// Maximum number of pixels. Pillow refuses to decode more.
const MAX_PIXELS: u64 = 178_956_970;

/// Maximum pixels of a side: the limit of JPEG and GIF.
const LONGEST: u32 = 65_535;

/// The contents of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Index into [`MEDIA_TYPES`].
    pub kind: u8,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
}

/// Reads the header of a file.
///
/// # Errors
/// Returns the reason why the file is not a usable image, worded to follow "a picture".
pub fn read(file: &[u8]) -> Result<Header, String> {
    let (kind, size) = match file {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => (0, png(file)),
        [0xff, 0xd8, 0xff, ..] => (1, jpeg(file)),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => (2, webp(file)),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => (3, gif(file)),
        _ => return Err(format!("whose file is {}, and PNG, JPEG, WebP and GIF are read", other(file))),
    };
    let truncated = || format!("whose file is cut before its size is said ({} bytes)", file.len());
    let (width, height) = size.ok_or_else(truncated)?;
    if width == 0 || height == 0 {
        return Err(format!("of {width} x {height} pixels"));
    }
    if width > LONGEST || height > LONGEST || u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(format!("of {width} x {height} pixels, which is more than any decoder takes"));
    }
    let (width, height) = if is_rotated(file) { (height, width) } else { (width, height) };
    Ok(Header { kind, width, height })
}

/// Returns true if EXIF says that the image is rotated by a quarter turn. Decoders rotate such an image before showing
/// it.
fn is_rotated(file: &[u8]) -> bool {
    exif(file).and_then(orientation).is_some_and(|turn| (5..=8).contains(&turn))
}

/// Returns the EXIF data of a file: a segment of JPEG, or a chunk of PNG or WebP.
fn exif(file: &[u8]) -> Option<&[u8]> {
    let strip = |data: &'_ [u8]| data.strip_prefix(b"Exif\0\0").unwrap_or(data).len();
    let data = match file {
        [0xff, ..] => {
            segments(file).find_map(|(marker, data)| (marker == 0xe1).then_some(data)?.strip_prefix(b"Exif\0\0"))?
        }
        [0x89, ..] => chunks(file, 8, 4, |at| Some((big(file, at)? as usize, at + 4, at + 8)), *b"eXIf")?,
        [b'R', ..] => chunks(file, 12, 0, |at| Some((little(file, at + 4)? as usize, at, at + 8)), *b"EXIF")?,
        _ => return None,
    };
    Some(&data[data.len() - strip(data)..])
}

/// Returns the data of the first chunk with a given name. `read` returns the length of a chunk and the offsets of its
/// name and data. Each chunk has `trailer` bytes after its data; if `trailer` is 0, chunks are padded to an even
/// length.
fn chunks(
    file: &[u8],
    first: usize,
    trailer: usize,
    read: impl Fn(usize) -> Option<(usize, usize, usize)>,
    name: [u8; 4],
) -> Option<&[u8]> {
    let mut at = first;
    loop {
        let (length, name_at, data) = read(at)?;
        let end = data.checked_add(length)?;
        if file.get(name_at..name_at + 4)? == name {
            return file.get(data..end);
        }
        at = end.checked_add(if trailer == 0 { length % 2 } else { trailer })?;
    }
}

/// Returns the orientation tag in the first directory of EXIF data.
fn orientation(data: &[u8]) -> Option<u32> {
    let big_endian = match data.get(..4)? {
        [b'M', b'M', 0, 42] => true,
        [b'I', b'I', 42, 0] => false,
        _ => return None,
    };
    let short = |at: usize| if big_endian { big16(data, at) } else { little16(data, at) };
    let directory = (if big_endian { big(data, 4) } else { little(data, 4) })? as usize;
    let entries = short(directory)? as usize;
    let at = (0..entries).map(|entry| directory + 2 + 12 * entry).find(|&at| short(at) == Some(0x0112))?;
    // The value is a short, or a long whose lower half counts.
    if big_endian && short(at + 2) == Some(4) { short(at + 10) } else { short(at + 8) }
}

fn png(file: &[u8]) -> Option<(u32, u32)> {
    (file.get(12..16)? == b"IHDR").then_some(())?;
    Some((big(file, 16)?, big(file, 20)?))
}

fn gif(file: &[u8]) -> Option<(u32, u32)> {
    Some((little16(file, 6)?, little16(file, 8)?))
}

/// Returns the size in the frame header.
fn jpeg(file: &[u8]) -> Option<(u32, u32)> {
    let is_frame = |marker: u8| matches!(marker, 0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf);
    let (_, data) = segments(file).find(|(marker, _)| is_frame(*marker))?;
    Some((big16(data, 3)?, big16(data, 1)?))
}

/// Returns the segments of a JPEG before its image data: their markers and their contents, as far as the file goes.
fn segments(file: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut at = 2;
    std::iter::from_fn(move || {
        loop {
            (*file.get(at)? == 0xff).then_some(())?;
            match *file.get(at + 1)? {
                // Fill bytes before a marker, and markers without a length.
                0xff => at += 1,
                0x01 | 0xd0..=0xd7 => at += 2,
                // The image data starts, or the file ends.
                0xd8..=0xda => return None,
                marker => {
                    let length = big16(file, at + 2).filter(|&length| length >= 2)? as usize;
                    let data = &file[at + 4..file.len().min(at + 2 + length)];
                    at += 2 + length;
                    return Some((marker, data));
                }
            }
        }
    })
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

/// Guesses the kind of an unsupported file.
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
    Some(u32::from_be_bytes(file.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn little(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(file.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn big16(file: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_be_bytes(file.get(at..at.checked_add(2)?)?.try_into().ok()?).into())
}

fn little16(file: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_le_bytes(file.get(at..at.checked_add(2)?)?.try_into().ok()?).into())
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
    const EXTENDED: &[u8] = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x04\0\0\x06\0\0";

    #[test]
    fn the_size_of_each_kind_is_read() {
        let files = [(0, PNG), (1, JPEG), (2, LOSSY), (2, LOSSLESS), (2, EXTENDED), (3, GIF)];
        for (kind, file) in files {
            assert_eq!(read(file), Ok(Header { kind, width: 5, height: 7 }), "{file:?}");
            for end in 8..file.len() {
                assert!(read(&file[..end]).is_err(), "{file:?} cut at {end}");
            }
        }
    }

    /// EXIF data of an image rotated by a quarter turn, in both byte orders.
    const TURNED: [&[u8]; 2] = [
        b"MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0",
        b"II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0",
    ];

    #[test]
    fn a_rotated_image_has_its_displayed_size() {
        for data in TURNED {
            let length = |extra: usize| (data.len() + extra) as u16;
            let jpeg = [&JPEG[..2], b"\xff\xe1", &length(8).to_be_bytes(), b"Exif\0\0", data, &JPEG[2..]].concat();
            let size = (length(0) as u32).to_be_bytes();
            let png = [PNG, b"\x08\x02\0\0\0crc.", &size, b"eXIf", data, b"crc."].concat();
            let webp = [EXTENDED, b"EXIF", &(length(0) as u32).to_le_bytes(), data].concat();
            for file in [&jpeg, &png, &webp] {
                let header = read(file).unwrap();
                assert_eq!((header.width, header.height), (7, 5), "{file:?}");
            }
            for end in 0..data.len() {
                assert!(orientation(&data[..end]).is_none_or(|turn| turn == 6), "cut at {end}");
            }
        }
    }

    #[test]
    fn sizes_and_kinds_that_no_decoder_supports_are_rejected() {
        let sized = |width: u32, height: u32| [&PNG[..16], &width.to_be_bytes(), &height.to_be_bytes()].concat();
        assert!(read(&sized(13_377, 13_377)).is_ok());
        for (width, height) in [(0, 5), (5, 0), (20_000, 20_000), (65_536, 1), (u32::MAX, u32::MAX)] {
            assert!(read(&sized(width, height)).unwrap_err().contains("pixels"), "{width} x {height}");
        }
        let cases = [
            (&b"%PDF-1.7"[..], "PDF"),
            (b"<?xml version='1.0'?><SVG xmlns=", "SVG"),
            (b"\0\0\0\x18ftypheic", "HEIC"),
            (b"\0\0\0\x18ftypavif", "AVIF"),
            (b"BM\0\0", "BMP"),
            (b"", "empty"),
            (b"hello", "no kind"),
        ];
        for (file, name) in cases {
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
