//! Standard output, written to by its descriptor.
//!
//! Not through `std::io::Stdout`: that has a buffer, which keeps the rest of a failed write for later, and counts a write to
//! a closed descriptor as done.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use super::write::{counted, given_up, told};

pub(super) struct StandardOutput {
    open: Option<Open>,
    /// The last write ended within a line; the next one begins with a newline.
    torn: bool,
}

struct Open {
    file: File,
    /// Something that can be synced.
    regular: bool,
}

impl StandardOutput {
    pub(super) fn new() -> Self {
        Self { open: None, torn: false }
    }

    pub(super) fn probe(&mut self) -> io::Result<()> {
        self.opened().map(drop)
    }

    pub(super) fn close(&mut self) {
        self.open = None;
    }

    /// Writes all of `text`, which ends with a newline, and syncs it where that means something. After an error whole lines
    /// and one torn line of it may have been written.
    pub(super) fn append(&mut self, text: &[u8], abandoned: &dyn Fn() -> bool) -> io::Result<()> {
        let torn = self.torn;
        let Open { file, regular } = self.opened()?;
        if abandoned() {
            return Err(given_up());
        }
        let mut newline_written = 0;
        let newline: &[u8] = if torn { b"\n" } else { b"" };
        let mut written = 0;
        let outcome = counted(file, newline, &mut newline_written, abandoned)
            .and_then(|()| counted(file, text, &mut written, abandoned))
            .and_then(|()| if *regular { file.sync_data() } else { Ok(()) });
        let last = usize::try_from(written).ok().and_then(|written| text.get(..written)).and_then(<[u8]>::last);
        self.torn = match last {
            Some(last) => *last != b'\n',
            None => torn && newline_written == 0,
        };
        outcome.map_err(|error| told(&error, format!("write {} bytes", text.len())))
    }

    fn opened(&mut self) -> io::Result<&Open> {
        if self.open.is_none() {
            self.open = Some(open()?);
        }
        self.open.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn open() -> io::Result<Open> {
    let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let about = file.metadata()?;
    // A program that is started with its standard output closed gets /dev/null there from Rust's runtime.
    let is_null =
        about.file_type().is_char_device() && fs::metadata("/dev/null").is_ok_and(|null| null.rdev() == about.rdev());
    if is_null {
        let why = "standard output is closed or /dev/null, which keeps no message; \
                   redirect it to a file or a program, or use kind = \"file\"";
        return Err(io::Error::new(io::ErrorKind::NotConnected, why));
    }
    Ok(Open { file, regular: about.is_file() })
}
