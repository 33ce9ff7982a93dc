package testenv

import (
	"net"
	"strconv"
	"testing"
)

// FreePorts returns the first of n ports of loopback in a row that nobody
// listens on just now.
func FreePorts(t testing.TB, n int) int {
	t.Helper()
	for range 100 {
		if port, ok := freeRow(t, n); ok {
			return port
		}
	}
	t.Fatalf("no %d free ports in a row", n)
	return 0
}

func freeRow(t testing.TB, n int) (int, bool) {
	t.Helper()
	first, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	port := first.Addr().(*net.TCPAddr).Port
	for add := 1; add < n; add++ {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port+add)))
		if err != nil {
			return 0, false
		}
		l.Close()
	}
	return port, port+n < 65500
}
