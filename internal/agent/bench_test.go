package agent_test

import (
	"io"
	"testing"

	"github.com/kernflux/opendsec/internal/agentclient"
)

func BenchmarkRunTrue(b *testing.B) {
	r := start(b)
	for b.Loop() {
		if res, err := r.Run(b.Context(), agentclient.Command{Path: "/bin/true"}); err != nil || res.ExitCode != 0 {
			b.Fatal(res, err)
		}
	}
}

func BenchmarkRunShell(b *testing.B) {
	r := start(b)
	for b.Loop() {
		if res, err := r.Run(b.Context(), agentclient.Shell("true")); err != nil || res.ExitCode != 0 {
			b.Fatal(res, err)
		}
	}
}

func BenchmarkActivity(b *testing.B) {
	r := start(b)
	for b.Loop() {
		if _, err := r.Activity(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOutput(b *testing.B) {
	r := start(b)
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		res, err := r.Run(b.Context(), agentclient.Command{Path: "head", Args: []string{"-c", "67108864", "/dev/zero"}, Stdout: io.Discard})
		if err != nil || res.ExitCode != 0 {
			b.Fatal(res, err)
		}
	}
}

func BenchmarkUpload(b *testing.B) {
	r := start(b)
	const size = 64 << 20
	file := b.TempDir() + "/file"
	b.SetBytes(size)
	for b.Loop() {
		if err := r.WriteFile(b.Context(), agentclient.File{Path: file}, io.LimitReader(zeros{}, size)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDownload(b *testing.B) {
	r := start(b)
	const size = 64 << 20
	file := b.TempDir() + "/file"
	if err := r.WriteFile(b.Context(), agentclient.File{Path: file}, io.LimitReader(zeros{}, size)); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(size)
	for b.Loop() {
		body, err := r.OpenFile(b.Context(), file, "")
		if err != nil {
			b.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, body); n != size || err != nil {
			b.Fatal(n, err)
		}
		body.Close()
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
