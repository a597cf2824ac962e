//! Runs one stage of the data path once, on a fixed workload.
//!
//! `counts make FOLDER` writes the workload. `counts run FOLDER STAGE` prepares a stage, runs it, and prints units,
//! allocations and peak bytes. `benches/counts.py` (`make bench-counts`) calls it under callgrind, which counts only the
//! instructions of the stage.

#[path = "counts/workload.rs"]
mod workload;

use serde_json::{Map, Value, json};
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tracegrad_core::align::{self, align};
use tracegrad_core::pack::{self, Branches, Cost, PackRequest, RowUnit, TooLong};
use tracegrad_core::ratio::{
    Aggregation, AnyRejection, Missing, Over, Per, Plan, Ratio, Reduce, Reduction, Rejection, Shape, SingleRank, Stat,
    Terms, Weight, When, correct_into,
};
use tracegrad_core::read::{Options, Reader};
use tracegrad_core::template::Session;
use tracegrad_core::trace::Trace;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The allocator of the extension. It counts the allocations and their bytes.
struct Counted;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

// SAFETY: every call is passed to mimalloc unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        unsafe { mimalloc::MiMalloc.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { mimalloc::MiMalloc.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        LIVE.fetch_sub(layout.size(), Relaxed);
        PEAK.fetch_max(LIVE.fetch_add(size, Relaxed) + size, Relaxed);
        unsafe { mimalloc::MiMalloc.realloc(pointer, layout, size) }
    }
}

/// Run the measured code and return its units of work.
type Stage = Box<dyn FnOnce() -> usize>;
/// A stage's name, what its units are, and how it is prepared.
type Named = (String, &'static str, Box<dyn FnOnce() -> Stage>);

fn read(file: &Path) -> Vec<Arc<Trace>> {
    let reader = Reader::open(file, Options::default()).expect("it opens");
    reader.map(|trace| Arc::new(trace.expect("a good record"))).collect()
}

fn reading(file: &Path) -> Stage {
    let file = file.to_owned();
    Box::new(move || {
        black_box(read(&file));
        std::fs::metadata(&file).expect("it is there").len() as usize
    })
}

fn aligning(file: &Path) -> Stage {
    let (traces, tokenizer) = (read(file), workload::tokenizer());
    Box::new(move || align(&traces, &tokenizer, None, align::Options::default()).expect("they align").ids.len())
}

/// Conversations of six turns, each rendered for its last prompt: the first time, or after the prompts of all turns
/// before. Many, as loading a tokenizer needs some 200,000 instructions more or less from run to run.
fn rendering(again: bool) -> Stage {
    const MANY: usize = 64;
    let tokenizer = workload::tokenizer();
    let text = "The clerk looked at the list, counted the crates twice and wrote 42 on the slip: naïve, but exact. ";
    let roles = ["user", "assistant"];
    let message = |number: usize, turn: usize| json!({"role": roles[turn % 2], "content": format!("{number} {turn} {}", text.repeat(16))});
    let all: Vec<Vec<Value>> = (0..MANY).map(|number| (0..13).map(|turn| message(number, turn)).collect()).collect();
    // They live as long as the process, as their sessions do.
    let all: &'static [Vec<Value>] = Box::leak(all.into_boxed_slice());
    let prompt = move |session: &mut Session<'static>, messages: &'static [Value]| {
        let template = tokenizer.template().expect("it has one");
        let messages: Vec<&Value> = messages.iter().collect();
        black_box(template.render_next(session, &messages, None, true, &Map::new()).expect("it renders"));
    };
    let mut sessions: Vec<Session<'static>> = all.iter().map(|_| Session::default()).collect();
    if again {
        for (session, messages) in sessions.iter_mut().zip(all) {
            for count in (1..13).step_by(2) {
                prompt(session, &messages[..count]);
            }
        }
    }
    Box::new(move || {
        for (session, messages) in sessions.iter_mut().zip(all) {
            prompt(session, messages);
        }
        MANY
    })
}

fn correcting(has_rejection: bool) -> Stage {
    const SIZE: usize = 1 << 18;
    let noise = |seed: usize| ((seed.wrapping_mul(2_654_435_761) >> 7) % 1000) as f32 / 1000.0;
    let rollout: Vec<f32> = (0..SIZE).map(|t| if t % 97 == 0 { f32::NAN } else { -3.0 * noise(t) }).collect();
    let old: Vec<f32> = (0..SIZE).map(|t| (-3.0 * noise(t) + noise(t + 1) - 0.5).min(0.0)).collect();
    let trace: Vec<i64> = (0..SIZE).map(|t| (t / 512) as i64).collect();
    let (mut weight, mut keep) = (vec![1.0; SIZE], vec![true; SIZE]);
    Box::new(move || {
        let shape = Shape::Truncate(0.0, 2.0);
        let tis =
            Weight { ratio: Ratio::MISMATCH, level: Aggregation::TOKEN, shape, when: When::Always, normalize: false };
        let level = Aggregation { over: Over::Trace, agg: Reduce::Mean, ..Aggregation::TOKEN };
        let (stat, when, scope) = (Stat::Ratio, When::Always, Over::Trace);
        let rejection = AnyRejection::Rejection(Rejection {
            ratio: Ratio::MISMATCH,
            stat,
            level,
            low: 0.9,
            high: 1.1,
            when,
            scope,
        });
        let reductions = vec![Reduction { per: Per::Token, mean: true, norm: 1.0, kept: false }];
        let rejections = if has_rejection { vec![rejection] } else { vec![] };
        let plan = Plan { rejections, weights: vec![tis], missing: Missing::Mask, reductions };
        let terms = Terms::of(Some(&old), Some(&rollout), &trace);
        black_box(correct_into(&terms, &plan, &SingleRank, &mut weight, &mut keep).expect("the step is well formed"));
        SIZE
    })
}

/// Rows of the agents' branches, many times over.
fn packing(file: &Path) -> Stage {
    const MANY: usize = 64;
    let aligned = align(&read(file), &workload::tokenizer(), None, align::Options::default()).expect("they align");
    let once = move || {
        let (ids, cu_seqlens, trace, trainable) =
            (&aligned.ids, &aligned.cu_seqlens, &aligned.trace, &aligned.trainable);
        let branches = Branches { cu_seqlens, trace, ids, trainable, names: &[] };
        let measured = pack::measure(branches, 32_768, RowUnit::Branch, TooLong::Error).expect("they fit");
        let (length, terms, step) = (&measured.length, &measured.terms, &vec![0; trace.len()]);
        let cost = Cost { token: 2.2e10, pair: 2.1e6, term: 2.3e9 };
        let (ranks, tokens_per_row, whole_traces, min_sharing_gain) = (1, 32_768, false, None);
        let request = PackRequest {
            ids,
            cu_seqlens,
            length,
            terms,
            trace,
            step,
            ranks,
            tokens_per_row,
            whole_traces,
            cost,
            min_sharing_gain,
        };
        let placed = pack::place(request).expect("they are consistent");
        let step: Vec<i32> = placed.row.iter().map(|&row| if row < 0 { -1 } else { 0 }).collect();
        let shared: Vec<bool> = placed.gain.iter().map(|gain| gain.shared).collect();
        let (row, order, rows) = (&placed.row, &placed.order, &placed.rows);
        let plan = pack::Plan { length, step: &step, row, order, rows, shared: &shared };
        let inv_temperature = &aligned.inv_temperature;
        let tokens = pack::Tokens { ids, trainable, inv_temperature, cu_seqlens };
        black_box(pack::write_rows(tokens, plan, 1).expect("they are consistent"));
        ids.len()
    };
    Box::new(move || (0..MANY).map(|_| once()).sum())
}

fn stages(folder: &Path) -> Vec<Named> {
    let file = |name: &str| folder.join(format!("{name}.jsonl"));
    let mut all: Vec<Named> = Vec::new();
    let text = file("text");
    all.push(("read text".to_owned(), "byte", Box::new(move || reading(&text))));
    for shape in &workload::SHAPES {
        for layout in workload::LAYOUTS {
            let name = format!("{}-{layout}", shape.name);
            let (one, other) = (file(&name), file(&name));
            if shape.name == "agents" {
                all.push((format!("read {name}"), "byte", Box::new(move || reading(&one))));
            }
            all.push((format!("align {name}"), "token", Box::new(move || aligning(&other))));
        }
    }
    all.push(("render first".to_owned(), "prompt", Box::new(|| rendering(false))));
    all.push(("render next turn".to_owned(), "prompt", Box::new(|| rendering(true))));
    all.push(("correct token".to_owned(), "term", Box::new(|| correcting(false))));
    all.push(("correct trace gate".to_owned(), "term", Box::new(|| correcting(true))));
    let agents = file("agents-names");
    all.push(("pack".to_owned(), "token", Box::new(move || packing(&agents))));
    all
}

/// Switches callgrind's counting on or off, for all threads; does nothing outside valgrind.
#[cfg(target_arch = "x86_64")]
fn count_instructions(on: bool) {
    // valgrind.h: rax points to the request and its arguments; the rotations, which add up to two full turns, are what
    // valgrind looks for.
    let request: [u64; 6] = [0x4354_0000 + if on { 4 } else { 5 }, 0, 0, 0, 0, 0];
    // SAFETY: outside valgrind the five instructions change nothing; in it `request` is read and rdx is written.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") &raw const request, inout("rdx") 0_u64 => _, options(nostack),
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn count_instructions(_on: bool) {}

fn main() {
    let told: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match told.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["make", folder] => {
            workload::make(Path::new(folder));
            for (name, _, _) in stages(Path::new(folder)) {
                println!("{name}");
            }
        }
        ["run", folder, name] => {
            let (_, unit, prepare) =
                stages(Path::new(folder)).into_iter().find(|stage| stage.0 == name).expect("`counts make` names it");
            let stage = prepare();
            let (allocations, live) = (ALLOCATIONS.load(Relaxed), LIVE.load(Relaxed));
            PEAK.store(live, Relaxed);
            count_instructions(true);
            let units = stage();
            count_instructions(false);
            let (allocations, peak) = (ALLOCATIONS.load(Relaxed) - allocations, PEAK.load(Relaxed) - live);
            println!("{}", json!({"unit": unit, "units": units, "allocations": allocations, "peak": peak}));
        }
        // `cargo bench` runs all benches, this one without arguments.
        _ => println!("counts: see benches/counts.py"),
    }
}
