//! Closes a connection such that the client can still read the last answer.
//!
//! A client that is answered 413 in the middle of its body is still sending. If the socket were
//! closed now, its bytes would be answered with a reset, and many clients would report a broken
//! connection instead of the answer. So the write side is shut down first, and what still arrives
//! is read and discarded, up to [`LINGER_BYTES_MAX`] and the connection's deadline.

use std::io::{self, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::connection_limit::Slot;

/// Most bytes discarded: several times what fits into the buffers of a client and its kernel.
const LINGER_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Bytes read at once.
const SCRATCH_BYTES: usize = 8 * 1024;

pub(super) struct Lingering {
    stream: TcpStream,
    slot: Arc<Slot>,
    /// Bytes that may still be discarded, once the write side is shut down.
    left: Option<usize>,
}

impl Lingering {
    pub(super) fn new(stream: TcpStream, slot: Arc<Slot>) -> Self {
        Self { stream, slot, left: None }
    }

    /// Reads what the kernel has, although the runtime may not know of it yet.
    fn read_now(&self, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Ok(copy) = self.stream.as_fd().try_clone_to_owned() else { return Poll::Pending };
        match std::net::TcpStream::from(copy).read(buffer.initialize_unfilled()) {
            Ok(bytes) => {
                buffer.advance(bytes);
                Poll::Ready(Ok(()))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl AsyncRead for Lingering {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_pending() && self.slot.is_asked() { self.read_now(buffer) } else { read }
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut left = match self.left {
            Some(left) => left,
            None => {
                ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
                LINGER_BYTES_MAX
            }
        };
        loop {
            self.left = Some(left);
            let mut scratch = [MaybeUninit::uninit(); SCRATCH_BYTES];
            let mut scratch = ReadBuf::uninit(&mut scratch);
            let read = ready!(Pin::new(&mut self.stream).poll_read(context, &mut scratch));
            let thrown_away = scratch.filled().len();
            if read.is_err() || thrown_away == 0 || thrown_away >= left {
                return Poll::Ready(Ok(()));
            }
            left -= thrown_away;
        }
    }
}
