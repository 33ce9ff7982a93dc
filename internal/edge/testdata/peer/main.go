// Peer is a server for tests, to run in a sandbox: peer MODE ADDRESS.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
)

func main() {
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(mode, address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	fmt.Println("listens")
	if mode == "http" {
		return http.Serve(l, http.HandlerFunc(answer))
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			handle(mode, c.(*net.TCPConn))
		}()
	}
}

func handle(mode string, c *net.TCPConn) {
	switch mode {
	case "echo": // until the other side sends no more
		_, _ = io.Copy(c, c)
	case "first": // sends no more from the beginning, and tells what it gets in a file
		_, _ = io.WriteString(c, "hello")
		_ = c.CloseWrite()
		got, err := io.ReadAll(c)
		_ = os.WriteFile("/tmp/first", fmt.Appendf(nil, "%s %v", got, err), 0o600)
	case "count": // how much it gets, and how that ends
		n, err := io.Copy(io.Discard, c)
		_, _ = io.WriteString(c, strconv.FormatInt(n, 10))
		_ = os.WriteFile("/tmp/count", fmt.Appendf(nil, "%d %v", n, err), 0o600)
	case "zeros": // as much as the other side takes
		buf := make([]byte, 64<<10)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	case "gone": // breaks off
		_, _ = io.ReadFull(c, make([]byte, 1))
		_ = c.SetLinger(0)
	}
}

// answer says what came, and echoes after an upgrade.
func answer(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "" {
		c, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
		_, _ = io.Copy(c, buffered)
		return
	}
	body, _ := io.ReadAll(r.Body)
	fmt.Fprintf(w, "%s %s %s %s", r.Method, r.Host, r.URL, body)
}
