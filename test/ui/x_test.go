package ui

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/partage-dev/partage/test/kubectl/fleets"
)

func TestLook(t *testing.T) {
	objects, err := fleets.Demo(Boards)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Open(context.Background(), objects, 1440, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var png []byte
	shot := func(name string, actions ...chromedp.Action[chromedp.Void]) {
		t.Helper()
		ctx, c := context.WithTimeout(p.Context, 2*time.Minute)
		defer c()
		if err := chromedp.Do(ctx, actions...); err != nil {
			t.Fatal(err, p.Errors())
		}
		var err error
		if png, err = chromedp.Run(ctx, chromedp.CaptureScreenshot()); err != nil {
			t.Fatal(err, p.Errors())
		}
		os.WriteFile("/tmp/ui/"+name+".png", png, 0o644)
	}
	shot("light", chromedp.Navigate(p.URL), chromedp.WaitVisible(chromedp.CSS(`[data-claim="claim/ci/runner-a"]`)))
	shot("claim", chromedp.Click(chromedp.CSS(`[data-claim="claim/serving/api-1"]`)), chromedp.WaitVisible(chromedp.CSS(`#detail-title`)), chromedp.Sleep(300*time.Millisecond))
	shot("dark", chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}})
		return err
	}), chromedp.Navigate(p.URL+"#/gpu/dgx-1/gpu-0000-5c-00-0"), chromedp.Sleep(1000*time.Millisecond))
	t.Log(p.Errors())
}
