package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// Serve answers a request with a tunnel to a connection, which it closes, and
// returns when that is over. A request whose context ends breaks it, and its
// caller, if there still is one, is told the context's cause; explain makes
// the error of another break.
func Serve(w http.ResponseWriter, r *http.Request, conn net.Conn, explain func(error) *fault.Error) {
	ctx := r.Context()
	stop := context.AfterFunc(ctx, func() { join.Break(conn) })
	defer stop()
	control := http.NewResponseController(w)
	// HTTP/1.1 reads no more of a request once an answer has begun, unless told to.
	_ = control.EnableFullDuplex() // HTTP/2 always does, and says "not supported"
	w.Header().Set("Content-Type", ContentType)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if err := control.Flush(); err != nil {
		join.Break(conn)
		return
	}
	sent := make(chan error, 1)
	go func() { sent <- send(conn, r.Body) }()
	err := deliver(w, control, conn)
	switch {
	case err == nil:
		if err = <-sent; err == nil {
			conn.Close()
			_, _ = w.Write(end(nil)) // the caller may be gone
			return
		}
		sent <- err
	case errors.Is(err, net.ErrClosed) && ctx.Err() == nil:
		err = <-sent // which broke it
		sent <- err
	}
	join.Break(conn)
	_, _ = w.Write(end(explain(err))) // the caller may be gone
	_ = control.Flush()
	if r.ProtoMajor > 1 {
		_ = control.SetReadDeadline(time.Unix(1, 0)) // ends the read of the request
		<-sent
		return
	}
	// Over HTTP/1.1 a server that closes while something comes loses what it said last.
	_ = control.SetReadDeadline(time.Now().Add(lastWords))
	<-sent
	_, _ = io.Copy(io.Discard, r.Body)
}

// lastWords is how long a caller that sends may take to see that all is over.
const lastWords = time.Second

// end returns the last frame.
func end(f *fault.Error) []byte {
	var words []byte
	if f != nil {
		words = fault.ToJSON(f)
	}
	frame := make([]byte, headSize, headSize+len(words))
	putHead(frame, frameEnd, len(words))
	return append(frame, words...)
}

// send passes on what the caller sends. A request that breaks off breaks the
// connection.
func send(conn net.Conn, body io.Reader) error {
	buf := buffers.Get().(*[headSize + bufferSize]byte)
	defer buffers.Put(buf)
	_, err := io.CopyBuffer(onlyWriter{conn}, body, buf[:])
	if err == nil {
		err = join.CloseWrite(conn)
	}
	if err != nil {
		join.Break(conn)
	}
	return err
}

// onlyWriter keeps io.CopyBuffer to the buffer that it is given.
type onlyWriter struct{ io.Writer }

// deliver passes on what comes from the connection until that ends well, which
// is no error.
func deliver(w io.Writer, control *http.ResponseController, conn net.Conn) error {
	buf := buffers.Get().(*[headSize + bufferSize]byte)
	defer buffers.Put(buf)
	for {
		n, err := conn.Read(buf[headSize:])
		kind := frameData
		if n == 0 && err == io.EOF {
			kind = frameEOF
		} else if n == 0 && err != nil {
			return err
		}
		putHead(buf[:], kind, n)
		if _, err := w.Write(buf[:headSize+n]); err != nil {
			return err
		}
		if err := control.Flush(); err != nil {
			return err
		}
		if kind == frameEOF {
			return nil
		}
	}
}
