package agent

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Callers' own properties of a file travel as headers and live in extended
// attributes.
const (
	metadataHeader = "X-Metadata-"
	metadataAttr   = "user.e2b."
	maxMetadataKey = 246  // bytes; with metadataAttr the kernel's limit
	maxMetadata    = 4096 // bytes of all keys and values of a file
)

// metadataOf reads the properties out of an upload's headers.
func metadataOf(h http.Header) (map[string]string, error) {
	var out map[string]string
	total := 0
	for name, values := range h {
		key, ok := strings.CutPrefix(name, metadataHeader)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		value := strings.Join(values, ",")
		total += len(key) + len(value)
		if key == "" || len(key) > maxMetadataKey || total > maxMetadata {
			return nil, fmt.Errorf("metadata %q: a key has 1 to %d bytes, and all of a file together at most %d", key, maxMetadataKey, maxMetadata)
		}
		if !printable(key) || !printable(value) {
			return nil, fmt.Errorf("metadata %q: keys and values are printable ASCII", key)
		}
		if out == nil {
			out = map[string]string{}
		}
		out[key] = value
	}
	return out, nil
}

func printable(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

// writeMetadata replaces all properties of a file. A file system that keeps
// none is an error only if there are some to keep.
func writeMetadata(f *os.File, metadata map[string]string) error {
	fd := int(f.Fd())
	for _, attr := range attributes(func(buf []byte) (int, error) { return unix.Flistxattr(fd, buf) }) {
		if _, stays := metadata[strings.TrimPrefix(attr, metadataAttr)]; !stays {
			if err := unix.Fremovexattr(fd, attr); err != nil && !errors.Is(err, unix.ENODATA) {
				return fmt.Errorf("remove metadata %s: %w", attr, err)
			}
		}
	}
	for key, value := range metadata {
		if err := unix.Fsetxattr(fd, metadataAttr+key, []byte(value), 0); err != nil {
			return fmt.Errorf("keep metadata %q: %w", key, err)
		}
	}
	return nil
}

// readMetadata returns the properties of the entry at name; nil for none. A
// symbolic link has none of its own.
func readMetadata(name string) map[string]string {
	var out map[string]string
	for _, attr := range attributes(func(buf []byte) (int, error) { return unix.Llistxattr(name, buf) }) {
		var buf [maxMetadata]byte
		n, err := unix.Lgetxattr(name, attr, buf[:])
		if err != nil {
			continue // removed meanwhile
		}
		if out == nil {
			out = map[string]string{}
		}
		out[strings.TrimPrefix(attr, metadataAttr)] = string(buf[:n])
	}
	return out
}

// attributes returns the names of our attributes among those that list gives.
func attributes(list func([]byte) (int, error)) []string {
	var small [1024]byte
	buf := small[:]
	n, err := list(buf)
	if errors.Is(err, syscall.ERANGE) {
		buf = make([]byte, 64<<10) // the kernel's limit
		n, err = list(buf)
	}
	if err != nil {
		return nil // this file system has none
	}
	var out []string
	for attr := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if strings.HasPrefix(attr, metadataAttr) {
			out = append(out, attr)
		}
	}
	return out
}
