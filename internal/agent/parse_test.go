package agent

import (
	"net/http"
	"path"
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/agent/account"
)

func TestPaths(t *testing.T) {
	home := caller{User: account.User{Home: "/home/user"}}
	work := caller{User: account.User{Home: "/home/user"}, workdir: "/app"}
	for _, tt := range []struct {
		c        caller
		in, want string
	}{
		{home, "", "/home/user"}, {work, "", "/app"}, {home, "a/b", "/home/user/a/b"}, {work, "a", "/app/a"},
		{work, "~", "/home/user"}, {work, "~/x/", "/home/user/x"}, {work, "~x", "/app/~x"}, {home, "/a//b/../c/", "/a/c"},
		{home, "../../../..", "/"}, {home, "/", "/"}, {home, "ü/🙂", "/home/user/ü/🙂"},
	} {
		if got, err := tt.c.path(tt.in); err != nil || got != tt.want {
			t.Errorf("path(%q) = %q, %v; want %q", tt.in, got, err, tt.want)
		}
	}
}

func FuzzPath(f *testing.F) {
	for _, s := range []string{"", "~", "~/../x", "a/./b", "//", "\x00", "~user/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		for _, dir := range []string{"", "/srv/dir"} {
			c := caller{User: account.User{Home: "/home/user"}, workdir: dir}
			got, err := c.path(in)
			if strings.ContainsRune(in, 0) != (err != nil) {
				t.Errorf("path(%q) = %q, %v", in, got, err)
			}
			if err == nil && (!path.IsAbs(got) || path.Clean(got) != got) {
				t.Errorf("path(%q) = %q, which is not absolute and clean", in, got)
			}
		}
	})
}

func TestPartNames(t *testing.T) {
	for in, want := range map[string][2]string{
		`form-data; name="file"; filename="/a/b/ü.txt"`:            {"file", "/a/b/ü.txt"},
		`form-data; name=file; filename=plain`:                     {"file", "plain"},
		`form-data; name="file"; filename="a \"q\" b"`:             {"file", `a "q" b`},
		`form-data; name="file"; filename="%22q%22%0D%0A%25"`:      {"file", "\"q\"\r\n%25"},
		`form-data; name="file"; filename*=UTF-8''%2Fa%2F%c3%bc`:   {"file", "/a/ü"},
		`form-data; name="file"; filename="C:\dir\x"`:              {"file", `C:\dir\x`},
		`form-data; filename="../../etc/passwd"; name="something"`: {"something", "../../etc/passwd"},
	} {
		name, file, has, err := partNames(in)
		if err != nil || !has || name != want[0] || file != want[1] {
			t.Errorf("partNames(%q) = %q, %q, %v, %v; want %q", in, name, file, has, err, want)
		}
	}
	for _, in := range []string{"", "attachment; filename=x", "form-data; name", "form-data; name=a; name=b"} {
		if name, file, _, err := partNames(in); err == nil {
			t.Errorf("partNames(%q) = %q, %q; want an error", in, name, file)
		}
	}
}

func FuzzPartNames(f *testing.F) {
	f.Add(`form-data; name="file"; filename="/a/ü"`)
	f.Add(`form-data; name*=UTF-8''x; filename*0=a; filename*1=b`)
	f.Fuzz(func(t *testing.T, in string) {
		name, file, has, err := partNames(in)
		if err != nil && (name != "" || file != "" || has) || !has && file != "" {
			t.Errorf("partNames(%q) = %q, %q, %v, %v", in, name, file, has, err)
		}
	})
}

func TestUserOf(t *testing.T) {
	for _, tt := range []struct{ own, auth, want string }{
		{"", "", ""}, {"a", "", "a"}, {"a", "Basic Yjo=", "a"}, {"", "Basic Yjo=", "b"}, {"", "Basic Yg==", "b"}, {"", "Basic !", ""}, {"", "Bearer Yjo=", ""},
	} {
		h := http.Header{}
		h.Set("Opendsec-User", tt.own)
		h.Set("Authorization", tt.auth)
		if got := userOf(h); got != tt.want {
			t.Errorf("userOf(%q, %q) = %q, want %q", tt.own, tt.auth, got, tt.want)
		}
	}
}

func TestRefusesIdentity(t *testing.T) {
	for in, want := range map[string]bool{
		"": false, "gzip": false, "gzip, *;q=0": true, "identity;q=0": true, "*;q=0, identity": false, "identity, *;q=0": false, "gzip;q=0": false, "identity; q=0.000": true, "identity;q=0.5": false,
	} {
		if got := refusesIdentity(in); got != want {
			t.Errorf("refusesIdentity(%q) = %v, want %v", in, got, want)
		}
	}
}

func TestHostsWith(t *testing.T) {
	const localhost = "127.0.0.1\tlocalhost\n"
	for _, tt := range []struct{ in, name, want string }{
		{"", "sb", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tsb\n"},
		{localhost, "sb", localhost + "127.0.1.1\tsb\n"},
		{"127.0.0.1 localhost sb", "sb", "127.0.0.1 localhost sb"},
		{localhost + "127.0.1.1\told\n", "sb", localhost + "127.0.1.1\tsb\n"},
		{localhost + "# sb\n10.0.0.1 sb2 # sb", "sb", localhost + "# sb\n10.0.0.1 sb2 # sb\n127.0.1.1\tsb\n"},
	} {
		if got := hostsWith(tt.in, tt.name); got != tt.want {
			t.Errorf("hostsWith(%q, %q) = %q, want %q", tt.in, tt.name, got, tt.want)
		}
	}
}

func TestCPUMeter(t *testing.T) {
	var c cpuMeter
	if got := c.since("cpu  10 0 10 70 10 0 0 0 99 99\ncpu0 ..."); got != 20 {
		t.Errorf("since the start: %v %%, want 20", got)
	}
	if got := c.since("cpu  85 0 10 95 10 0 0 0 99 99"); got != 75 {
		t.Errorf("since then: %v %%, want 75", got)
	}
	if got := c.since(""); got != 0 {
		t.Errorf("without the file: %v %%, want 0", got)
	}
}
