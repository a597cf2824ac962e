//! Names the code that reads tokenizers, by a hash of its sources and of the versions of all libraries: what another version
//! of it has kept on disk is then not taken for its own.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let here = env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?;
    let room = Path::new(&here).join("src/tokenizer");
    let mut files = fs::read_dir(&room)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    files.sort();
    // Where the crate is built on its own there is none.
    let versions = Path::new(&here).join("../../Cargo.lock");
    files.extend(versions.exists().then_some(versions));
    let mut hasher = DefaultHasher::new();
    for file in &files {
        fs::read(file)?.hash(&mut hasher);
        println!("cargo::rerun-if-changed={}", file.display());
    }
    println!("cargo::rerun-if-changed={}", room.display());
    println!("cargo::rustc-env=TOKENIZER_CODE={:016x}", hasher.finish());
    Ok(())
}
