package image

import (
	"log/slog"
	"testing"
)

func TestBootstrapDebian(t *testing.T) {
	s, err := Open(slog.New(slog.DiscardHandler), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.Bootstrap(t.Context(), BootstrapOptions{Distribution: "debian"}, func(p Progress) { t.Log(p) })
	if err != nil {
		t.Fatal(err)
	}
	t.Log(a)
}
