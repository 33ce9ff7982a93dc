package image

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/image/imagetest"
)

// BenchmarkCommitMemory commits a snapshot of a few files that were written a
// moment ago.
func BenchmarkCommitMemory(b *testing.B) {
	for _, megabytes := range []int{15, 500} {
		b.Run(fmt.Sprintf("%dMB", megabytes), func(b *testing.B) {
			s := openStore(b, b.TempDir())
			base := importSimple(b, s, "a").Digest
			block := make([]byte, 1<<20)
			if _, err := rand.Read(block); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				b.StopTimer()
				d, err := s.Begin()
				if err != nil {
					b.Fatal(err)
				}
				writeFile(b, filepath.Join(d.Dir(), "state"), block[:100_000], 1)
				writeFile(b, filepath.Join(d.Dir(), "upper"), block[:4096], 1)
				writeFile(b, filepath.Join(d.Dir(), "pages"), block, megabytes)
				b.StartTimer()
				a, err := d.CommitMemory(memoryOf(base), Config{}, "")
				b.StopTimer()
				if err := errors.Join(err, d.Abort(), s.Delete(a.Digest)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

func writeFile(b *testing.B, name string, block []byte, times int) {
	b.Helper()
	f, err := os.Create(name)
	for range times {
		if err == nil {
			_, err = f.Write(block)
		}
	}
	if err := errors.Join(err, f.Close()); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkPack packs changed files over a small image and over a built one,
// which takes a minute at first.
func BenchmarkPack(b *testing.B) {
	s := openStore(b, b.TempDir())
	archive := filepath.Join(b.TempDir(), "busybox.tar")
	imagetest.Busybox(b, archive, "sh")
	small, err := s.Import(b.Context(), ImportOptions{Source: "docker-archive:" + archive}, nil)
	if err != nil {
		b.Fatal(err)
	}
	debian, err := s.Bootstrap(b.Context(), BootstrapOptions{Distribution: "debian"}, nil)
	if err != nil {
		b.Fatal(err)
	}
	for name, base := range map[string]Artifact{"busybox": small, "debian": debian} {
		for _, files := range []int{10, 5000} {
			b.Run(fmt.Sprintf("%s/%dMB/%d", name, base.Size>>20, files), func(b *testing.B) {
				layer := manyFiles(b, files)
				for b.Loop() {
					a, err := s.Pack(b.Context(), PackOptions{Base: base.Digest, Layer: bytes.NewReader(layer)})
					b.StopTimer()
					if err := errors.Join(err, s.Delete(a.Digest)); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			})
		}
	}
}

// manyFiles is a layer of files of 4 KiB in directories of 100.
func manyFiles(b *testing.B, n int) []byte {
	entries := []imagetest.Entry{imagetest.Dir("work")}
	for i := range n {
		if i%100 == 0 {
			entries = append(entries, imagetest.Dir(fmt.Sprintf("work/%d", i/100)))
		}
		entries = append(entries, imagetest.File(fmt.Sprintf("work/%d/%d", i/100, i), strings.Repeat(fmt.Sprintf("%08d", i), 512)).
			With(func(h *tar.Header) { h.Mode = 0o600 }))
	}
	return imagetest.Tar(b, entries...)
}
